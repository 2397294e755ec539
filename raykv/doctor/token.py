"""Ray's token, here and in the cluster. A process with a wrong token can't join, so it is never checked."""

import ray

from raykv.client import token
from raykv.doctor.finding import OK, WRONG, Finding


def finding() -> Finding:
    """The finding of this process, at its node. If it is not OK, no node answers: Ray's calls back are turned away."""
    context = ray.get_runtime_context()
    node = context.get_node_id()
    if not token.is_sent():
        return Finding(node, "token", OK, "none, and the Ray cluster asks for none")
    if token.is_asked_for(context.gcs_address):
        return Finding(node, "token", OK, "the Ray cluster's")
    file = f", or remove {token.FILE}, which a local ray.init() leaves" if token.source() == token.FILE else ""
    text = f"this process has one (of {token.source()}), and the Ray cluster has none, so that no node can answer: "
    return Finding(node, "token", WRONG, f"{text}set RAY_AUTH_MODE=disabled here{file}")
