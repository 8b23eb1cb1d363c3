"""A job on many nodes: one supervisor leads, the others follow. They share only the run directory.

The supervisor that holds the run directory's lock leads: it decides about attempts, writes the journal and gives orders
(`RUN/nodes/orders.json`). The supervisors of the other nodes follow: each starts and ends its torchrun by these orders
and reports (`RUN/nodes/node-*.json`). Every file has one writer. A follower whose leader is gone ends its ranks and
tries to get the lock; the supervisor that gets it leads. So any node may be lost.

    protocol      what is said, and the tables of what follows from it; pure
    membership    whether this job has many nodes, and this node's name and place among them
    lead, follow  the two sides
"""
