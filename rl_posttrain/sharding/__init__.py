"""Where arrays live: the mesh, the rules from logical to mesh axes, the shardings that follow from both."""
