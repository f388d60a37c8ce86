"""The live timeline, drawn while ranks train."""
