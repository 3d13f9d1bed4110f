"""What a run can measure, behind one interface."""
