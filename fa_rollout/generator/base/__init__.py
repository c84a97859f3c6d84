"""What every part of the generator stands on: tasks, holds, slots, the link to the hub."""
