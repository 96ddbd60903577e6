"""What must hold of a graph between two passes, and the proof that a schedule is safe."""
