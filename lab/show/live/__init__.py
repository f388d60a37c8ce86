"""The timeline that is drawn while ranks train."""
