"""The book: the stored notebooks and the public functions as HTML pages, for ``lab book``."""
