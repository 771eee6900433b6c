"""From sequence files to reading frames and ORFs: reading, chunking, translation, and the store on disk."""
