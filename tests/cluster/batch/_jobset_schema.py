"""JSON schema of the fields of a JobSet that megacore writes.

Source: the APIs of JobSet (jobset.x-k8s.io/v1alpha2) and of Kubernetes.
"""

from typing import Any

NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
QUANTITY = {
    "anyOf": [
        {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": r"^\d+(\.\d+)?([KMGTPE]i?|k|m)?$"},
    ]
}
COUNT = {"type": "integer", "minimum": 1, "maximum": 2**31 - 1}
LABELS = {"type": "object", "additionalProperties": {"type": "string", "maxLength": 63}}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*required],
        "additionalProperties": False,
    }


def _array(items: dict[str, Any], min_items: int = 1) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": min_items}


RESOURCES = {"type": "object", "additionalProperties": QUANTITY}
CONTAINER = _object(
    ("name", "image", "command"),
    name=NAME,
    image={"type": "string", "minLength": 1},
    command=_array({"type": "string"}),
    ports=_array(
        _object(
            ("containerPort",), containerPort={"type": "integer", "minimum": 1, "maximum": 65535}
        )
    ),
    resources=_object((), requests=RESOURCES, limits=RESOURCES),
    volumeMounts=_array(
        _object(("name", "mountPath"), name=NAME, mountPath={"type": "string", "pattern": "^/"})
    ),
)
VOLUME = _object(
    ("name",),
    name=NAME,
    persistentVolumeClaim=_object(("claimName",), claimName=NAME),
    emptyDir=_object((), medium={"enum": ["", "Memory"]}, sizeLimit=QUANTITY),
)
POD = _object(
    ("containers", "restartPolicy"),
    restartPolicy={"enum": ["Never", "OnFailure"]},  # a Job refuses Always
    enableServiceLinks={"type": "boolean"},
    terminationGracePeriodSeconds={"type": "integer", "minimum": 0},
    serviceAccountName=NAME,
    nodeSelector=LABELS,
    containers=_array(CONTAINER),
    volumes=_array(VOLUME),
)
JOB = _object(
    ("template",),
    completionMode={"enum": ["Indexed", "NonIndexed"]},
    completions=COUNT,
    parallelism=COUNT,
    backoffLimit={"type": "integer", "minimum": 0},
    template=_object(("spec",), spec=POD),
)
JOBSET = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "jobset.x-k8s.io/v1alpha2"},
    kind={"const": "JobSet"},
    metadata=_object(("name",), name=NAME, namespace=NAME, labels=LABELS),
    spec=_object(
        ("replicatedJobs",),
        failurePolicy=_object((), maxRestarts={"type": "integer", "minimum": 0}),
        network=_object((), enableDNSHostnames={"type": "boolean"}, subdomain=NAME),
        ttlSecondsAfterFinished={"type": "integer", "minimum": 0},
        suspend={"type": "boolean"},
        replicatedJobs=_array(
            _object(
                ("name", "template"),
                name=NAME,
                replicas=COUNT,
                template=_object(("spec",), spec=JOB),
            )
        ),
    ),
)
