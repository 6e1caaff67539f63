"""Every message that crosses a process border: structs, subjects, streams. Imports nothing else of Headrace's."""
