"""The store package knows which entry rests where, and moves entries on request."""
