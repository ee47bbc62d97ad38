"""The learner: ``stages`` compiles an agent's update, ``learner`` runs it batch after batch and publishes params."""
