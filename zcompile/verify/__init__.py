"""States what must hold of a graph, and proves schedules safe."""
