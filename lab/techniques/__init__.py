"""The techniques: one function ``apply_<technique>`` each. ``lab/step/compose.py`` applies them in order."""
