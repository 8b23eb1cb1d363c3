"""A job on many nodes: one supervisor leads, the others follow, and the run directory is all they share.

Whoever holds the run directory's lock leads: it decides about attempts, keeps the journal and gives orders
(`RUN/nodes/orders.json`). The supervisors of the other nodes follow: each starts and ends its own torchrun as it is
told and reports (`RUN/nodes/node-*.json`). Every file has one writer. A follower whose leader is gone ends its ranks
and tries for the lock: whoever gets it leads from then on, and the others follow that one. So it does not matter
which node is lost.

    protocol      what is said, and the tables of what follows from it; pure
    membership    whether this job has many nodes, and this node's name and place among them
    lead, follow  the two sides
"""
