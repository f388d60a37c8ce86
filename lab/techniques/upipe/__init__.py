"""Untied Ulysses (UPipe): attention in stages of heads that use the same buffers again."""
