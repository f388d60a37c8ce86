"""The real step on one device as one rank of many."""
