"""Draft: guesses what decode will say next. It can only make decode faster, never change its output."""
