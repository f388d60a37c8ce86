"""Where the bytes are: the meter counts them, the timeline holds them."""
