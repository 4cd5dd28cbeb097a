"""What a job costs: seconds of engines, those of its tail, and when enough is answered."""
