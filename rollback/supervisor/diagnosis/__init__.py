"""What ended an attempt, and whether a job hangs: evidence in, a finding out. Ends and starts nothing."""
