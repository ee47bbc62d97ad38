"""Who runs where: ``parts`` makes the rooms, ``driver`` turns them, ``sync`` and ``threads`` run them, ``run`` is a run."""
