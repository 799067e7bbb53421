"""A request's way through SGLang: its arguments, the task that drives it, its output."""
