"""What the words of a command line say: spelt out, made into parameters, read as values and as settings."""
