"""From a verdict to a plan that is carried out: judge, cases, rollback, requests, and the evidence that is kept."""
