"""Better programs than a schedule of blocks can say: which single op runs again, judged by exact liveness."""
