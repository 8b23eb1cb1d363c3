"""torchrun on this host: its command line, its processes, its output.

flags             torchrun's command line, as a table; pure
command           what torchrun is called with, and the environment of the ranks; pure
start_conditions  what an attempt is started with, and how that differs from the last start
redaction         secrets are written nowhere; pure
host              attempts on this host
processes         starts torchrun, finds and ends every process of an attempt
standby           the torchrun process of the next attempt, started ahead
output            what the ranks print: into files for each attempt and rank, and to the terminal
"""
