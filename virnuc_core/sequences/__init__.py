"""From sequence files to stop-free frames: reading, chunking, translation, and the store on disk."""
