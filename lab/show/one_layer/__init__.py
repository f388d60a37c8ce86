"""One layer's forward and backward as an animation: its frames as data, a player, a strip and a GIF."""
