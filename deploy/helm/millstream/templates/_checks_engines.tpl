{{/* What a pool's engine can't do with its values. The checks of _checks.tpl, continued. */}}
{{- define "millstream.checkEngine" -}}
{{- $pool := .pool -}}
{{- $model := index .root.Values.models $pool.model -}}
{{- include "millstream.checkEngineArgs" . -}}
{{- $simulated := eq (include "millstream.engine" .) "simulated" -}}
{{- if and (not $model.uri) (not $simulated) }}
models.{{ $pool.model }}.uri is empty, and {{ $pool.path }} needs its files; set it, such as hf://org/name (only settings.engine=simulated runs without)
{{- end -}}
{{- if and (eq $pool.role "diffusion") (eq ($pool.settings.kind | default "image") "text") (not $simulated) (not $pool.settings.dllm_algorithm) }}
{{ $pool.path }}.settings.kind is text, which needs settings.dllm_algorithm: how the model's blocks are denoised, such as LowConfidence
{{- end -}}
{{- if and $pool.groups.exclusive (not $pool.groups.topologyKey) }}
{{ $pool.path }}.groups.exclusive is true, and topologyKey is empty; name the label of nodes that says where a group fits, such as topology.kubernetes.io/zone
{{- end -}}
{{- if and (gt (int $pool.parallelism.nodes) 1) (not (.root.Capabilities.APIVersions.Has "leaderworkerset.x-k8s.io/v1")) }}
{{ $pool.path }}.parallelism.nodes is {{ int $pool.parallelism.nodes }}, and the cluster has no LeaderWorkerSet; install it (https://lws.sigs.k8s.io), or set nodes to 1. To render without a cluster add --api-versions leaderworkerset.x-k8s.io/v1
{{- end -}}
{{- end -}}

{{/* Arguments that the pool's engine doesn't have, or that Millstream sets: files/<engine>.json lists them. */}}
{{- define "millstream.checkEngineArgs" -}}
{{- $pool := .pool -}}
{{- $engine := include "millstream.engine" . -}}
{{- $kind := get (dict "embedding" "vectors" "encode" "encode") $pool.role | default (include "millstream.makesMedia" . | empty | ternary "text" "diffusion") -}}
{{- $lists := .root.Files.Get (printf "files/%s.json" $engine) | default "{}" | fromJson -}}
{{- $managed := dig "managed" $kind "" $lists -}}
{{- $names := dig "names" $kind (dig "names" "text" list $lists) $lists -}}
{{- $sizes := dict "tp_size" "tensor" "pp_size" "pipeline" "dp_size" "data" "attn_dp_size" "attentionData" "enable_dp_attention" "attentionData"
  "nnodes" "nodes" "tensor_parallel_size" "tensor" "pipeline_parallel_size" "pipeline" "data_parallel_size" "data" "node_rank" "nodes" "dist_init_addr" "nodes" -}}
{{- range $name, $_ := $pool.engineArgs -}}
{{- $flag := $name | replace "-" "_" -}}
{{- if hasKey $sizes $flag }}
{{ $pool.path }}.engineArgs.{{ $name }} can't be set here, since GPUs and nodes are computed from it; set {{ $pool.path }}.parallelism.{{ index $sizes $flag }}
{{- else if kindIs "string" $managed }}
{{ $pool.path }}.engineArgs.{{ $name }}: the engine {{ $engine }} takes no arguments of its own in a pool of role {{ $pool.role }}; remove engineArgs, or set settings.engine
{{- else if not (has $flag $names) }}
{{ $pool.path }}.engineArgs.{{ $name }}: {{ get (dict "sglang" "SGLang" "vllm" "vLLM") $engine | default (printf "the %s engine" $engine) }} has no such argument
{{- else if hasKey $managed $flag -}}
{{- $why := index $managed $flag }}
{{ $pool.path }}.engineArgs.{{ $name }} can't be set here: {{ regexMatch "^--[a-z-]+$" $why | ternary (printf "set %s.settings.%s" $pool.path ($why | trimPrefix "--" | replace "-" "_")) $why }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Counts of GPUs that no engine can use. */}}
{{- define "millstream.checkGpus" -}}
{{- $pool := .pool -}}
{{- $path := printf "%s.parallelism" $pool.path -}}
{{- $tensor := int $pool.parallelism.tensor -}}{{- $pipeline := int $pool.parallelism.pipeline -}}
{{- $data := int $pool.parallelism.data -}}{{- $nodes := int $pool.parallelism.nodes -}}
{{- $total := include "millstream.gpus" . | int -}}
{{- if mod $tensor (int $pool.parallelism.attentionData) }}
{{ $path }}.attentionData is {{ int $pool.parallelism.attentionData }}, which doesn't divide tensor, {{ $tensor }}; the groups of data-parallel attention share the GPUs of tensor parallelism
{{- end -}}
{{- if mod (mul $tensor $pipeline) $nodes }}
{{ $path }}: tensor {{ $tensor }} x pipeline {{ $pipeline }} can't be spread evenly over {{ $nodes }} nodes; make their product a multiple of {{ $nodes }}, or change nodes
{{- end -}}
{{- if and (gt $data 1) (gt $nodes 1) }}
{{ $path }}: SGLang runs no copies (data {{ $data }}) of a model that spans nodes ({{ $nodes }}); set data to 1 and raise replicas, or use attentionData
{{- end -}}
{{- if and (gt $data 1) (eq $pool.role "embedding") }}
{{ $path }}.data is {{ $data }}, and embedding workers run one copy; raise replicas instead
{{- end -}}
{{- if and (eq $pool.role "encode") (gt (mul $tensor $pipeline $data $nodes) 1) }}
{{ $path }}: an encode worker runs on one GPU; remove it and raise replicas
{{- end -}}
{{- if and (include "millstream.makesMedia" .) (gt (mul $pipeline $data $nodes) 1) }}
{{ $path }}: images and videos know tensor parallelism only; set pipeline, data and nodes to 1
{{- end -}}
{{- if and (include "millstream.makesMedia" .) (gt $tensor 1) (ne (include "millstream.engine" .) "sglang") }}
{{ $path }}.tensor is {{ $tensor }}, and the engine {{ include "millstream.engine" . }} uses one GPU; set settings.engine to sglang, or tensor to 1
{{- end -}}
{{- if and (eq (include "millstream.engine" .) "vllm") (or (gt $nodes 1) (gt (int $pool.parallelism.attentionData) 1)) }}
{{ $path }}: a vLLM worker is on one node, and has no attentionData; set nodes and attentionData to 1
{{- end -}}
{{- range $path, $resource := dict "gpu.resource" $pool.gpu.resource "rdma.resource" $pool.rdma.resource -}}
{{- if and $resource (not (contains "/" $resource)) }}
{{ $pool.path }}.{{ $path }} is {{ $resource }}, which isn't the name of a device; name it as the nodes do, such as nvidia.com/gpu
{{- end -}}
{{- end -}}
{{- $perNode := div $total $nodes -}}
{{- if and $pool.gpu.perNode (ne (int $pool.gpu.perNode) (int $perNode)) }}
{{ $pool.path }}.gpu.perNode is {{ int $pool.gpu.perNode }}, but tensor {{ $tensor }} x pipeline {{ $pipeline }} x data {{ $data }} on {{ $nodes }} node(s) needs {{ $perNode }} per node{{ if not $pool.gpu.resource }} and gpu.resource is empty{{ end }}; remove perNode, or change `parallelism`
{{- end -}}
{{- if and (contains "/mig-" $pool.gpu.resource) (gt $perNode 1) }}
{{ $pool.path }}: {{ $perNode }} instances of {{ $pool.gpu.resource }} can't run one engine, since MIG instances don't communicate; use whole GPUs (nvidia.com/gpu), or one instance
{{- end -}}
{{- range $kind := list "requests" "limits" -}}
{{- if and $pool.gpu.resource (hasKey (index $pool.resources $kind | default dict) $pool.gpu.resource) }}
{{ $pool.path }}.resources.{{ $kind }}: the number of {{ $pool.gpu.resource }} is computed; remove it, or change `parallelism`
{{- end -}}
{{- end -}}
{{- end -}}
