"""What tests share: helpers, stand-ins, small models, and the oracles that no bench uses."""
