"""The exercises of each lesson, one module a lesson: functions that look at an answer and return a hint, "" where it is right."""
