"""The tests: a file for each subject, and ``support`` for what they share."""
