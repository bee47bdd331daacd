"""Workers as actors in a Ray cluster (extra ``ray``)."""
