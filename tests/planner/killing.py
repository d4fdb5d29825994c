"""Ends the planner's actor."""

import ray
from ray.exceptions import RayActorError

from treecp_rl.planner.service import SERVICE_NAME


def kill_service():
    """End the service, and come back when nobody answers to its name; Ray starts it again in a second or so."""
    service = ray.get_actor(SERVICE_NAME)
    ray.kill(service, no_restart=False)
    while True:
        try:
            ray.get(service.events.remote(), timeout=30)
        except RayActorError:
            return
