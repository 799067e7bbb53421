"""Values that contradict each other are refused, with a sentence that says what to change."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.deploy.deploy_tools import Helm, RenderError

MODELS: dict[str, Any] = {"llama": {"uri": "hf://org/llama"}}


def decode(**pool: Any) -> dict[str, Any]:
    return {"models": MODELS, "decode": role(model="llama", **pool)}


def role(**pool: Any) -> dict[str, Any]:
    return {"enabled": True, "pools": {"main": pool}}


def tls(**values: Any) -> dict[str, Any]:
    return {**decode(), "security": {"tls": {"enabled": True, **values}}}


def parallel(**sizes: int) -> dict[str, Any]:
    return decode(parallelism=sizes)


def model(**entry: Any) -> dict[str, Any]:
    return {**decode(), "models": {"llama": entry}}


WEIGHTS = {"claimName": "weights"}
ISSUER = {"certManager": {"issuerRef": {"name": "ca"}}}

REFUSED: list[tuple[str, dict[str, Any]]] = [
    # ---- roles and models
    ("no pool of workers is enabled; take one of the values-*.yaml", {}),
    (
        'decode.pools.main.model is "lama", which isn\'t in `models` (llama); add it there',
        {"models": MODELS, "decode": role(model="lama")},
    ),
    (
        "prefill.pools.main: model llama has prefill workers, and no decode workers",
        {"models": MODELS, "prefill": role(model="llama")},
    ),
    (
        "decode.pools.main.settings.mode is disaggregated, and model llama has no prefill workers",
        decode(settings={"mode": "disaggregated"}),
    ),
    (
        "and no decode workers that take their KV cache; add a pool to `decode`",
        {**decode(settings={"mode": "aggregated"}), "prefill": role(model="llama")},
    ),
    (
        "that take their KV cache; add a pool to `decode` with this model and settings.engine vllm",
        {**decode(), "prefill": role(model="llama", settings={"engine": "vllm"})},
    ),
    (
        "has no prefill workers; add a pool to `prefill` with this model and settings.engine vllm",
        {
            **decode(settings={"engine": "vllm", "mode": "disaggregated"}),
            "prefill": role(model="llama"),
        },
    ),
    (
        "prefill.pools.main.settings.kv_connector is push, and no decode pool of model llama has",
        {
            **decode(settings={"engine": "vllm", "kv_connector": "pull"}),
            "prefill": role(model="llama", settings={"engine": "vllm"}),
        },
    ),
    (
        "encode.pools.main: model llama has encode workers, and no decode workers",
        {"models": MODELS, "encode": role(model="llama")},
    ),
    (
        "model llama is used by pools for chats and for embedding, and a model does one of them",
        {**decode(), "embedding": role(model="llama")},
    ),
    (
        "processor: the Processor has no model, GPU, RDMA device or nodes",
        {**decode(), "processor": {"model": "llama"}},
    ),
    (
        "models.b: another model is served as a too; give one of them another servedName",
        {**decode(), "models": {"llama": {"uri": "hf://o/l"}, "a": {}, "b": {"servedName": "a"}}},
    ),
    ("models.llama.uri is empty, and decode.pools.main needs its files", model()),
    ("models.llama.size is missing: the claim", model(uri="hf://o/l", download="job")),
    ("volumes of storage class ssd need one", model(uri="s3://b/l", storageClass="ssd")),
    ("there is nothing to download from", model(uri="pvc://c/l", download="job")),
    ("models.llama.prune is for download: job", model(uri="hf://o/l", prune=True)),
    ("models.llama.revision is for hf:// URIs; remove it", model(uri="s3://b/l", revision="v1")),
    # ---- sections of which all lines are comments: Helm takes the defaults away too
    ("missing property 'networkPolicy'", {**decode(), "networkPolicy": None}),
    ("missing property 'security'", {**decode(), "security": None}),
    ("'/security': missing property 'tls'", {**decode(), "security": {"tls": None}}),
    ("'/poolDefaults': missing property 'gpu'", {**decode(), "poolDefaults": {"gpu": None}}),
    ("models.llama has two revisions, v1 and the", model(uri="hf://o/l@main", revision="v1")),
    (
        "/models/llama/uri': 'pvc://a}, evil: {b' does not match pattern",
        model(uri="pvc://a}, evil: {b"),
    ),
    (
        "decode.pools.main.settings.model_path can't be set here: it is made of `models`",
        decode(settings={"model_path": "/x"}),
    ),
    (
        "diffusion.pools.main.settings.kind is text, which needs settings.dllm_algorithm",
        {"models": MODELS, "diffusion": role(model="llama", settings={"kind": "text"})},
    ),
    # ---- GPUs
    ("tensor 3 x pipeline 1 can't be spread evenly over 2 nodes", parallel(tensor=3, nodes=2)),
    ("attentionData is 3, which doesn't divide tensor, 4", parallel(tensor=4, attentionData=3)),
    (
        "SGLang runs no copies (data 2) of a model that spans nodes (2)",
        parallel(tensor=2, data=2, nodes=2),
    ),
    (
        "gpu.perNode is 4, but tensor 2 x pipeline 2 x data 2 on 1 node(s) needs 8 per node",
        decode(parallelism={"tensor": 2, "pipeline": 2, "data": 2}, gpu={"perNode": 4}),
    ),
    (
        "gpu.perNode is 1, but tensor 1 x pipeline 1 x data 1 on 1 node(s) needs 0 per",
        decode(gpu={"resource": "", "perNode": 1}),
    ),
    (
        "2 instances of nvidia.com/mig-1g.10gb can't run one engine",
        decode(parallelism={"tensor": 2}, gpu={"resource": "nvidia.com/mig-1g.10gb"}),
    ),
    (
        "decode.pools.main.resources.limits: the number of nvidia.com/gpu is computed",
        decode(resources={"limits": {"nvidia.com/gpu": 2}}),
    ),
    (
        "engineArgs.tp-size can't be set here, since GPUs and nodes are computed from it",
        decode(engineArgs={"tp-size": 2}),
    ),
    (
        "encode.pools.main.parallelism: an encode worker runs on one GPU",
        {**decode(), "encode": role(model="llama", parallelism={"tensor": 2})},
    ),
    (
        "embedding.pools.main.parallelism.data is 2, and embedding workers run one copy",
        {"models": MODELS, "embedding": role(model="llama", parallelism={"data": 2})},
    ),
    (
        "parallelism.tensor is 2, and the engine diffusers uses one GPU",
        {"models": MODELS, "diffusion": role(model="llama", parallelism={"tensor": 2})},
    ),
    (
        "images and videos know tensor parallelism only",
        {"models": MODELS, "diffusion": role(model="llama", parallelism={"pipeline": 2})},
    ),
    (
        "decode.pools.main.parallelism: a vLLM worker is on one node, and has no attentionData",
        decode(parallelism={"tensor": 2, "nodes": 2}, settings={"engine": "vllm"}),
    ),
    (
        "groups.exclusive is true, and topologyKey is empty",
        decode(parallelism={"nodes": 2}, groups={"exclusive": True, "topologyKey": ""}),
    ),
    (
        "engineArgs.data_parallel_size can't be set here, since GPUs and nodes are computed",
        decode(engineArgs={"data_parallel_size": 2}, settings={"engine": "vllm"}),
    ),
    # ---- TLS and discovery
    ("security.tls.enabled needs certificates for the role decode; set security.tls.certM", tls()),
    ("security.tls has an issuer and existing secrets", tls(existingSecret="all", **ISSUER)),
    (
        "security.tls.probes can't work with requireClientCertificates",
        tls(probes=True, requireClientCertificates=True, **ISSUER),
    ),
    (
        "allowedClients need security.tls.requireClientCertificates=true",
        tls(allowedClients=["a"], **ISSUER),
    ),
    (
        "security.tls.requireClientCertificates is set, and TLS is off",
        tls(enabled=False, requireClientCertificates=True),
    ),
    (
        "decode.pools.main.settings.tls_cert_file can't be set here: set security.tls",
        decode(settings={"tls": {"cert_file": "/x"}}),
    ),
    (
        "name the Processor's account in serviceAccount.processorName",
        {
            **decode(),
            "serviceAccount": {"create": False},
        },
    ),
    (
        "whose answers may be 30 s old, and decode.pools.main replaces a pod after 10 s",
        {**decode(), "discovery": {"kind": "dns"}},
    ),
    (
        "whose answers may be 30 s old, and decode.pools.main replaces a pod after 20 s",
        {
            **decode(
                parallelism={"nodes": 2},
                rollout={"minReadySeconds": 60},
                drain={"preStopSeconds": 20},
            ),
            "discovery": {"kind": "dns"},
        },
    ),
    (
        "decode.pools.main.engineArgs.mem-fracton-static: SGLang has no such argument",
        decode(engineArgs={"mem-fracton-static": 0.8}),
    ),
    (
        "engineArgs.max_total_tokens can't be set here: set decode.pools.main.settings.max_total_",
        decode(engineArgs={"max_total_tokens": 8}),
    ),
    (
        "decode.pools.main.engineArgs.gpu_memory: vLLM has no such argument",
        decode(engineArgs={"gpu_memory": 0.8}, settings={"engine": "vllm"}),
    ),
    (
        "engineArgs.max-model-len can't be set here: set decode.pools.main.settings.context_len",
        decode(engineArgs={"max-model-len": 8}, settings={"engine": "vllm"}),
    ),
    (
        "embedding.pools.main.engineArgs.step_s: the simulated engine has no such argument",
        {
            "models": MODELS,
            "embedding": role(
                model="llama", settings={"engine": "simulated"}, engineArgs={"step_s": 1}
            ),
        },
    ),
    (
        "engineArgs.webui can't be set here: SGLang's HTTP server isn't started",
        {
            "models": MODELS,
            "diffusion": role(
                model="llama", settings={"engine": "sglang"}, engineArgs={"webui": True}
            ),
        },
    ),
    (
        "the engine diffusers takes no arguments of its own in a pool of role diffusion",
        {"models": MODELS, "diffusion": role(model="llama", engineArgs={"tp_size": 1, "a": 1})},
    ),
    # ---- what the API server would refuse, after half of the release is installed
    ("additional properties 'nodeAfinity' not allowed", decode(affinity={"nodeAfinity": {}})),
    ("additional properties 'efect' not allowed", decode(tolerations=[{"efect": "NoSchedule"}])),
    (
        "additional properties 'secretRef' not allowed",
        decode(env=[{"name": "A", "valueFrom": {"secretRef": {}}}]),
    ),
    (
        "'/networkPolicy/clients/0/ipBlock/cidr': '10.0.0.0/33' does not match pattern",
        {**decode(), "networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/33"}}]}},
    ),
    (
        "requests.memory is 64Gi and limits.memory is 32G; a limit can't be below its request",
        decode(resources={"requests": {"memory": "64Gi"}, "limits": {"memory": "32G"}}),
    ),
    (
        "requests.ephemeral-storage is 40Gi and limits.ephemeral-storage is 8Gi; a limit can't",
        {
            **decode(resources={"limits": {"ephemeral-storage": "8Gi"}}),
            "models": {"llama": {"uri": "hf://o/l", "size": "40Gi"}},
        },
    ),
    (
        "helmTest.resources: requests.cpu is 500m and limits.cpu is 0.4; a limit can't be below",
        {
            **decode(),
            "helmTest": {"resources": {"requests": {"cpu": "500m"}, "limits": {"cpu": "0.4"}}},
        },
    ),
    (
        "decode.pools.main.podLabels: millstream.io/pool is the chart's own",
        decode(podLabels={"millstream.io/pool": "x"}),
    ),
    (
        "commonLabels: app.kubernetes.io/name is the chart's own",
        {**decode(), "commonLabels": {"app.kubernetes.io/name": "x"}},
    ),
    (
        "commonAnnotations: helm.sh/hook has a meaning of its own on each object",
        {**decode(), "commonAnnotations": {"helm.sh/hook": "test"}},
    ),
    (
        "the claim weights is the pod's volume model-llama already, and one that is there",
        {
            **decode(extraVolumes=[{"name": "more", "persistentVolumeClaim": WEIGHTS}]),
            "models": {"llama": {"uri": "pvc://weights/llama"}},
        },
    ),
    (
        "processor.extraVolumes: the claim weights is the pod's volume model-llama already",
        {
            **decode(),
            "models": {"llama": {"uri": "pvc://weights/llama"}},
            "processor": {"extraVolumes": [{"name": "more", "persistentVolumeClaim": WEIGHTS}]},
        },
    ),
    (
        "the claim weights is the pod's volume cache already",
        decode(
            cache={"claim": "weights"},
            extraVolumes=[{"name": "more", "persistentVolumeClaim": WEIGHTS}],
        ),
    ),
    (
        "decode.pools.main.extraVolumes: shm is the name of a volume of the chart's own",
        decode(extraVolumes=[{"name": "shm", "emptyDir": {}}]),
    ),
    (
        "decode.pools.main.cache has a claim and a directory of the node",
        decode(cache={"claim": "a", "hostPath": "/b"}),
    ),
    (
        "decode.pools.main.cache.claim is the claim of the model too",
        {**decode(cache={"claim": "c"}), "models": {"llama": {"uri": "pvc://c/l"}}},
    ),
    (
        "processor.service.nodePort is set, and the type is ClusterIP",
        {**decode(), "processor": {"service": {"nodePort": 30000}}},
    ),
    (
        "processor.service.loadBalancerClass is set, and the type is NodePort",
        {**decode(), "processor": {"service": {"type": "NodePort", "loadBalancerClass": "x"}}},
    ),
    (
        "processor.service.type is NodePort, and networkPolicy.clients lets no addresses in, only",
        {**decode(), "processor": {"service": {"type": "NodePort"}}},
    ),
    (
        "decode.pools.main.podAnnotations: checksum/config is the chart's own",
        decode(podAnnotations={"checksum/config": "x"}),
    ),
    (
        "decode.pools.main.gpu.resource is gpu, which isn't the name of a device",
        decode(gpu={"resource": "gpu"}),
    ),
    # ---- settings and rollout
    (
        "are computed; set decode.pools.main.settings.drain_s instead",
        decode(env=[{"name": "MILLSTREAM_DRAIN_S", "value": "5"}]),
    ),
    (
        'decode.pools.main.settings.drain_s is "5m"; it must be a number',
        decode(settings={"drain_s": "5m"}),
    ),
    (
        "decode.pools.main.settings.drian_s: decode has no such setting; services/millstream_ser",
        decode(settings={"drian_s": 5}),
    ),
    (
        "decode.pools.main.settings.max_running_requests is 1.5; it must be an integer",
        decode(settings={"max_running_requests": 1.5}),
    ),
    (
        'decode.pools.main.settings.log_level is "loud"; it must be debug or info or warning or',
        decode(settings={"log": {"level": "loud"}}),
    ),
    (
        "diffusion.pools.main.settings.max_pixels: diffusion-text has no such setting",
        {
            "models": MODELS,
            "diffusion": role(
                model="llama",
                settings={"kind": "text", "dllm_algorithm": "LowConfidence", "max_pixels": 9},
            ),
        },
    ),
    (
        "decode.pools.main.settings.engine_args can't be set here: set engineArgs of the pool",
        decode(settings={"engine_args": {"tp_size": 2}}),
    ),
    (
        "decode.pools.main.rollout: maxSurge and maxUnavailable are both 0",
        decode(rollout={"maxSurge": 0, "maxUnavailable": 0}),
    ),
]


@pytest.mark.parametrize(("sentence", "values"), REFUSED, ids=[text for text, _ in REFUSED])
def test_a_contradiction_is_refused(sentence: str, values: dict[str, Any], helm4: Helm) -> None:
    with pytest.raises(RenderError) as refused:
        helm4.text(values=values)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("sentence", "values", "cluster"),
    [
        (
            "the cluster has no LeaderWorkerSet; install it",
            parallel(tensor=2, nodes=2),
            {"apis": ()},
        ),
        ("the cluster has no cert-manager; install it", tls(**ISSUER), {"apis": ()}),
        (
            "security.tls.probes needs Kubernetes 1.37 or later, and the cluster has v1.36.0",
            tls(probes=True, **ISSUER),
            {"kubernetes": "1.36"},
        ),
        (
            "models.llama.uri is an image volume, which is on from Kubernetes 1.35 on",
            model(uri="oci://registry/llama:1"),
            {"kubernetes": "1.34"},
        ),
        (
            "downloads.imageVolumes is true, and image volumes need Kubernetes 1.31 or later",
            {**model(uri="oci://registry/llama:1"), "downloads": {"imageVolumes": True}},
            {"kubernetes": "1.30"},
        ),
    ],
)
def test_what_the_cluster_lacks_is_said(
    sentence: str, values: dict[str, Any], cluster: dict[str, Any], helm4: Helm
) -> None:
    with pytest.raises(RenderError) as refused:
        helm4.text(values=values, **cluster)
    assert sentence in str(refused.value)


def test_all_mistakes_are_reported_at_once(helm3: Helm) -> None:
    values = decode(engineArgs={"nnodes": 2}, settings={"listen": "x"})
    with pytest.raises(RenderError) as refused:
        helm3.text(values=values)
    assert str(refused.value).count("\n  * ") == 2
