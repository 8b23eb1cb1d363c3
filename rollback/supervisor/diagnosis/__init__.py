"""What ended an attempt, and whether a job hangs: evidence in, a finding out. Ends and starts nothing.

attempt_record, outcome, first_cause, blamed_data and hang are pure.
"""
