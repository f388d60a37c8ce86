"""What the lab does for you, one verb a file."""
