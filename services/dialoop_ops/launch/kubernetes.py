"""Write a job as Kubernetes manifests, from the launch plan.

The trainer is a JobSet that is complete when it ends, each replica a LeaderWorkerSet, the other
services are Deployments. Redis is yours: its address and the token come from a Secret.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dialoop.errors import InvalidConfig

from dialoop_ops.launch.elsewhere import CONFIG_FILE, FOLDER, job_file, plan_elsewhere
from dialoop_ops.launch.plan import REPLICAS
from dialoop_ops.launch.yaml_text import yaml_of
from dialoop_ops.stack.layout import FIXED_PORTS, service_of

if TYPE_CHECKING:
    from dialoop_services.config.job import JobConfig

    from dialoop_ops.launch.plan import PlannedProcess

Manifest = dict[str, Any]

_PROBE_EVERY_S = 10
_UID = 10001
_GROUPS_PER_SCORER = "32"
_LABEL = re.compile("[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_MONITORING = [
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
]
_PROMETHEUS = {"prometheus.io/scrape": "true", "prometheus.io/path": "/metrics"}


def manifests_of(config: JobConfig) -> list[Manifest]:
    """Return all objects of the job, in the order in which they can be created.

    Raises InvalidConfig for a run whose name no object could carry as a label.
    """
    if not _LABEL.fullmatch(config.run):
        raise InvalidConfig(
            f"run is {config.run!r}, which is no label of Kubernetes.",
            remedy="Give it up to 63 letters, digits, '-', '_' and '.', a letter or digit last.",
        )
    plan = plan_elsewhere(config, _host_of)
    job = _Job(config)
    objects = [job.config_map(), job.volume()]
    for process in plan.processes:
        if process.group == REPLICAS:
            objects.append(job.leader_worker_set(process))
        elif process.role == "trainer":
            objects += [job.service(process), job.job_set(process)]
        else:
            objects += [job.service(process), job.deployment(process)]
    return [*objects, job.autoscaler(), *job.network_policies()]


def text_of(config: JobConfig) -> str:
    """Return the manifests as YAML, as `kubectl apply -f -` takes it."""
    return yaml_of(manifests_of(config))


def _host_of(name: str) -> str:
    """Return the name under which others reach a process in its namespace.

    A LeaderWorkerSet gives its pod a name of the set and a number, under a service of its own.
    """
    return f"{name}-0.{name}" if service_of(name) == "inference" else name


class _Job:
    """The manifests of one job."""

    def __init__(self, config: JobConfig) -> None:
        self._config = config
        self._options = config.launch.kubernetes

    def config_map(self) -> Manifest:
        """Return the job file."""
        return self._object("v1", "ConfigMap", "job", data={"job.toml": job_file(self._config)})

    def volume(self) -> Manifest:
        """Return the claim of the volume that all nodes share."""
        options = self._options
        spec: Manifest = {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": f"{options.volume_gib}Gi"}},
        }
        if options.storage_class:
            spec["storageClassName"] = options.storage_class
        return self._object("v1", "PersistentVolumeClaim", "runs", spec=spec)

    def service(self, process: PlannedProcess) -> Manifest:
        """Return the name and ports under which others reach a process."""
        ports = [
            {"name": "grpc", "port": FIXED_PORTS[process.role], "appProtocol": "kubernetes.io/h2c"},
            {"name": "rest", "port": FIXED_PORTS[f"{process.role}_rest"]},
        ]
        spec = {"selector": self._labels(process.name), "ports": ports}
        return self._object("v1", "Service", process.name, spec=spec)

    def deployment(self, process: PlannedProcess) -> Manifest:
        """Return a service that is started again wherever there is room."""
        spec: Manifest = {
            "selector": {"matchLabels": self._labels(process.name)},
            "template": self._pod(process),
        }
        if process.role != "scorer":  # whose number the autoscaler sets
            spec["replicas"] = 1
        if process.role in ("replay", "environment"):
            # Two at a time would hold different sessions, and leases would end in one of them.
            spec["strategy"] = {"type": "Recreate"}
        return self._object("apps/v1", "Deployment", process.name, spec=spec)

    def job_set(self, process: PlannedProcess) -> Manifest:
        """Return the trainer, with whose end the job is complete."""
        pod = self._pod(process)
        # A pod that is started again in place would hide the exit code of a wrong setting.
        pod["spec"]["restartPolicy"] = "Never"
        disrupted = {"type": "DisruptionTarget", "status": "True"}
        fatal = {"operator": "In", "values": list(process.restart.fatal_exit_codes)}
        job = {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": 1000,
            "podFailurePolicy": {
                "rules": [
                    {"action": "FailJob", "onExitCodes": fatal},
                    {"action": "Ignore", "onPodConditions": [disrupted]},
                ]
            },
            "template": pod,
        }
        spec = {
            "successPolicy": {"operator": "All", "targetReplicatedJobs": ["trainer"]},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": "trainer", "replicas": 1, "template": {"spec": job}}],
        }
        # Not "trainer": a JobSet makes a service of its own name, and that is our service's.
        return self._object("jobset.x-k8s.io/v1alpha2", "JobSet", "train", queued=True, spec=spec)

    def leader_worker_set(self, process: PlannedProcess) -> Manifest:
        """Return a replica: a group of one pod, whose devices are on one node."""
        template = self._pod(process)
        spec = {
            "replicas": 1,
            "leaderWorkerTemplate": {
                "size": 1,
                "restartPolicy": "RecreateGroupOnPodRestart",
                "workerTemplate": template,
            },
        }
        kind = ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", process.name)
        return self._object(*kind, queued=True, spec=spec)

    def autoscaler(self) -> Manifest:
        """Return what starts more scorers the more groups wait for one."""
        metric = {
            "type": "External",
            "external": {
                "metric": {
                    "name": "dialoop_groups",
                    "selector": {"matchLabels": {"state": "unscored"}},
                },
                "target": {"type": "AverageValue", "averageValue": _GROUPS_PER_SCORER},
            },
        }
        spec = {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "scorer"},
            "minReplicas": 1,
            "maxReplicas": self._options.max_scorers,
            "metrics": [metric],
        }
        return self._object("autoscaling/v2", "HorizontalPodAutoscaler", "scorer", spec=spec)

    def network_policies(self) -> list[Manifest]:
        """Return who may call whom: pods of the job each other, the sandbox the policy."""
        rest = [{"port": port} for name, port in FIXED_PORTS.items() if name.endswith("_rest")]
        ours = [{"podSelector": {"matchLabels": self._labels()}}]
        everyone = self._object(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            "job",
            spec={
                "podSelector": {"matchLabels": self._labels()},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": ours}, {"from": _MONITORING, "ports": rest}],
            },
        )
        names = [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]
        policy = [{"port": FIXED_PORTS["inference"]}]
        replicas = {"matchLabels": {**self._labels(), "dialoop/role": "inference"}}
        sandbox = self._object(
            "networking.k8s.io/v1",
            "NetworkPolicy",
            "sandbox",
            spec={
                "podSelector": {"matchLabels": self._labels("environment")},
                "policyTypes": ["Egress"],
                "egress": [
                    {"to": [{"podSelector": replicas}], "ports": policy},
                    {"to": [{"namespaceSelector": {}}], "ports": names},
                ],
            },
        )
        return [everyone, sandbox]

    def _labels(self, name: str = "") -> dict[str, str]:
        of_job = {"app.kubernetes.io/part-of": "dialoop", "dialoop/run": self._config.run}
        return of_job | ({"app.kubernetes.io/component": name} if name else {})

    def _object(
        self, version: str, kind: str, name: str, *, queued: bool = False, **fields: Any
    ) -> Manifest:
        labels = self._labels()
        if queued and self._options.queue:
            labels[_QUEUE_LABEL] = self._options.queue
        metadata = {"name": name, "namespace": self._options.namespace, "labels": labels}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, **fields}

    def _pod(self, process: PlannedProcess) -> Manifest:
        labels = self._labels(process.name) | {"dialoop/role": process.role}
        rest = {"prometheus.io/port": str(FIXED_PORTS[f"{process.role}_rest"])}
        volumes: list[Manifest] = [
            {"name": "job", "configMap": {"name": "job"}},
            {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
        spec: Manifest = {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,  # its variables would look like settings of ours
            "terminationGracePeriodSeconds": int(process.stop_grace_s),
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": _UID,
                "runAsGroup": _UID,
                "fsGroup": _UID,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self._container(process)],
            "volumes": volumes,
        }
        if process.needs_model and not self._config.model.directory:
            spec["initContainers"] = [self._wait_for_model(process)]
        return {"metadata": {"labels": labels, "annotations": _PROMETHEUS | rest}, "spec": spec}

    def _container(self, process: PlannedProcess) -> Manifest:
        port, rest = FIXED_PORTS[process.role], FIXED_PORTS[f"{process.role}_rest"]
        probe = {"grpc": {"port": port}, "timeoutSeconds": 5, "periodSeconds": _PROBE_EVERY_S}
        alive = max(1, round(process.hang_timeout_s / _PROBE_EVERY_S))
        start = round(max(process.ready_timeout_s, 600.0) / _PROBE_EVERY_S)
        container: Manifest = {
            "name": process.role,
            "image": self._image(process),
            "command": list(process.command),
            "env": self._variables(process),
            "ports": [
                {"name": "grpc", "containerPort": port},
                {"name": "rest", "containerPort": rest},
            ],
            # A model that loads slowly is not unhealthy: the other probes begin after this one.
            "startupProbe": {"tcpSocket": {"port": port}, "failureThreshold": start}
            | {"periodSeconds": _PROBE_EVERY_S},
            "readinessProbe": probe,
            "livenessProbe": {
                "tcpSocket": {"port": port},
                "periodSeconds": _PROBE_EVERY_S,
                "failureThreshold": alive,
            },
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": [
                {"name": "job", "mountPath": CONFIG_FILE.rpartition("/")[0], "readOnly": True},
                {"name": "runs", "mountPath": str(FOLDER / "runs")},
                {"name": "tmp", "mountPath": "/tmp"},
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        }
        resources = _resources(process)
        if resources:
            container["resources"] = resources
        return container

    def _image(self, process: PlannedProcess) -> str:
        is_gpu = process.role == "inference" and process.needs.gpus
        return self._options.image.format(target=f"{process.role}{'-gpu' if is_gpu else ''}")

    def _variables(self, process: PlannedProcess) -> list[Manifest]:
        secrets = {"DIALOOP_TOKEN": "token"}
        if process.role == "replay":
            secrets["DIALOOP_REPLAY_REDIS_URL"] = "redis_url"
        secret = self._options.secret
        return [
            *({"name": name, "value": value} for name, value in process.variables.items()),
            *(
                {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
                for name, key in secrets.items()
            ),
        ]

    def _wait_for_model(self, process: PlannedProcess) -> Manifest:
        """Return what waits until the trainer has made the tiny model."""
        container = self._container(process)
        model = FOLDER / "runs" / self._config.run / "model" / "model.safetensors"
        kept = ("image", "securityContext", "volumeMounts")
        return {
            "name": "wait-for-model",
            "command": ["sh", "-c", f"until [ -f {model} ]; do sleep 1; done"],
            **{key: container[key] for key in kept},
        }


def _resources(process: PlannedProcess) -> Manifest:
    """Return requests and limits; devices and memory are limits too, processors are not."""
    needs = process.needs
    requests: Manifest = {}
    limits: Manifest = {}
    if needs.processors:
        requests["cpu"] = str(needs.processors)
    if needs.memory_gib:
        requests["memory"] = limits["memory"] = f"{round(needs.memory_gib * 1024)}Mi"
    if needs.gpus:
        requests["nvidia.com/gpu"] = limits["nvidia.com/gpu"] = str(needs.gpus)
    return {name: value for name, value in (("requests", requests), ("limits", limits)) if value}
