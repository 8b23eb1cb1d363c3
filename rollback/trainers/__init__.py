"""The guard inside the training loops of other libraries: a module or a room for each, found by `protect`.

They stand on what `Guard` shows to any script, and on the library's own loop, whose versions are checked when it is
used. No library is imported that the script has not imported.
"""
