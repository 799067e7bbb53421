{{/*
Mistakes that a schema can't see, because they concern several values. All of them are reported at once,
each as a sentence that says what to change. A check's template writes one line per mistake.
*/}}
{{- define "millstream.checks" -}}
{{- $found := list -}}
{{- range $check := list "Pools" "Models" "Downloads" "Service" "Tls" "Discovery" "Autoscaling" "Network" "Gateway" -}}
{{- range include (printf "millstream.check%s" $check) $ | splitList "\n" -}}
{{- with trim . -}}{{- $found = append $found . -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- with uniq $found -}}
{{- printf "\n\n  * %s\n\n" (join "\n  * " .) | fail -}}
{{- end -}}
{{- end -}}

{{- define "millstream.checkPools" -}}
{{- $root := . -}}
{{- $pools := include "millstream.pools" . | fromYamlArray -}}
{{- $names := list -}}
{{- $workers := 0 -}}
{{- $known := .Files.Get "files/settings.json" | fromJson -}}
{{- range $pool := $pools -}}
{{- $about := dict "root" $root "pool" $pool "pools" $pools "known" $known -}}
{{- if has $pool.fullname $names }}
{{ $pool.path }}: the name {{ $pool.fullname }} is another pool's too; rename this pool
{{- end -}}
{{- $names = append $names $pool.fullname -}}
{{- include "millstream.checkPoolSettings" $about -}}
{{- include "millstream.checkResources" (list (printf "%s.resources" $pool.path) (include "millstream.resources" $about | fromYaml)) -}}
{{- include "millstream.checkPodLabels" $about -}}
{{- if $pool.worker -}}
{{- $workers = add1 $workers -}}
{{- if hasKey $root.Values.models $pool.model -}}
{{- include "millstream.checkPartners" $about -}}
{{- include "millstream.checkEngine" $about -}}
{{- include "millstream.checkGpus" $about -}}
{{- else }}
{{ $pool.path }}.model is {{ $pool.model | quote }}, which isn't in `models` ({{ keys $root.Values.models | sortAlpha | join ", " | default "empty" }}); add it there, or name one of those
{{- end -}}
{{- else if or $pool.model $pool.gpu.resource $pool.rdma.enabled (gt (int $pool.parallelism.nodes) 1) }}
{{ $pool.path }}: the Processor has no model, GPU, RDMA device or nodes of its own; remove `model`, `gpu`, `rdma` and `parallelism` there
{{- end -}}
{{- end -}}
{{- if not $workers }}
no pool of workers is enabled; take one of the values-*.yaml beside values.yaml, or set for instance decode.enabled=true, decode.pools.main.model=NAME and models.NAME.uri=hf://…
{{- end -}}
{{- end -}}

{{/* Values that contradict what the chart sets itself. */}}
{{- define "millstream.checkPoolSettings" -}}
{{- $pool := .pool -}}
{{- $instead := dict
  "listen" "it is fixed: services and probes use it"
  "metrics_listen" "it is fixed: services and scrapers use it"
  "health_listen" "it is set with security.tls.enabled"
  "models" "it is made of `models` and the pools"
  "workers" "add discovery.extraWorkers"
  "model_path" "it is made of `models`"
  "model_name" "set servedName of the model"
  "engine_args" "set engineArgs of the pool"
  "nodes" "set parallelism.nodes"
  "node_rank" "LeaderWorkerSet sets it"
  "leader_address" "LeaderWorkerSet sets it"
  "bootstrap_host" "it is the pod's address"
  "bootstrap_port" "it is fixed: each pod has an address of its own"
  "num_gpus" "set parallelism.tensor"
  "api_keys_file" "set security.apiKeys"
  "ticket_key" "set security.ticketKey.existingSecret"
  "api_keys" "set security.apiKeys.existingSecret"
  "allowed_peers" "it is made of security.tls.identities"
  "admin_peers" "set security.tls.adminPeers" -}}
{{- range $name, $value := include "millstream.flatten" (omit $pool.settings "engine_args" "models") | fromYaml -}}
{{- if hasKey $instead $name }}
{{ $pool.path }}.settings.{{ $name }} can't be set here: {{ index $instead $name }}
{{- else if or (hasPrefix "tls_" $name) (hasPrefix "worker_tls_" $name) (hasPrefix "encode_tls_" $name) }}
{{ $pool.path }}.settings.{{ $name }} can't be set here: set security.tls
{{- end -}}
{{- end -}}
{{- include "millstream.checkSettingTypes" . -}}
{{- range $name := list "engine_args" "models" -}}
{{- if hasKey $pool.settings $name }}
{{ $pool.path }}.settings.{{ $name }} can't be set here: {{ index $instead $name }}
{{- end -}}
{{- end -}}
{{- range $pool.env -}}
{{- if hasPrefix "MILLSTREAM_" .name }}
{{ $pool.path }}.env: {{ .name }} would override the pool's configuration file, from which drain and probes are computed; set {{ $pool.path }}.settings.{{ trimPrefix "MILLSTREAM_" .name | lower }} instead
{{- end -}}
{{- end -}}
{{- if and $pool.cache.claim $pool.cache.hostPath }}
{{ $pool.path }}.cache has a claim and a directory of the node; remove one of them
{{- end -}}
{{- if and $pool.cache.claim (hasPrefix (printf "pvc://%s/" $pool.cache.claim) (printf "%s/" (dig $pool.model "uri" "" .root.Values.models))) }}
{{ $pool.path }}.cache.claim is the claim of the model too, which pods mount read-only; name another
{{- end -}}
{{- if and (has (toString $pool.rollout.maxSurge) (list "0" "0%")) (has (toString $pool.rollout.maxUnavailable) (list "0" "0%")) }}
{{ $pool.path }}.rollout: maxSurge and maxUnavailable are both 0, so no pod could be replaced; set maxSurge to 1, or maxUnavailable to 1 where no GPU is free
{{- end -}}
{{- end -}}

{{/* Settings that the service doesn't have, or of another type: files/settings.json lists them. */}}
{{- define "millstream.checkSettingTypes" -}}
{{- $pool := .pool -}}
{{- $kind := $pool.settings.kind | default "image" | toString -}}
{{- $role := and (eq $pool.role "diffusion") (eq $kind "text") | ternary "diffusion-text" $pool.role -}}
{{- $known := index .known $role -}}
{{- range $name, $value := include "millstream.flatten" (omit $pool.settings "engine_args" "models") | fromYaml -}}
{{- $path := printf "%s.settings.%s" $pool.path $name -}}
{{- $type := index $known $name -}}
{{- $number := regexMatch "^(int|int64|float64)$" (kindOf $value) -}}
{{- if not $type }}
{{ $path }}: {{ $role }} has no such setting; services/millstream_server/{{ $pool.role }}/README.md lists its settings
{{- else if kindIs "slice" $type -}}
{{- if not (has $value $type) }}
{{ $path }} is {{ $value | quote }}; it must be {{ join " or " $type }}
{{- end -}}
{{- else if or (and (eq $type "integer") (or (not $number) (ne (floor $value) (float64 $value))))
  (and (eq $type "number") (not $number))
  (and (eq $type "boolean") (not (kindIs "bool" $value)))
  (and (eq $type "string") (not (kindIs "string" $value)))
  (and (eq $type "array") (not (kindIs "slice" $value))) }}
{{ $path }} is {{ $value | toJson }}; it must be {{ has $type (list "integer" "array") | ternary "an" "a" }} {{ $type }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What an API server would refuse, after half of the release is installed. Takes a list: a path, resources. */}}
{{- define "millstream.checkResources" -}}
{{- $path := index . 0 -}}
{{- $limits := (index . 1).limits | default dict -}}
{{- range $name, $request := (index . 1).requests -}}
{{- if hasKey $limits $name -}}
{{- $limit := index $limits $name -}}
{{- if lt (include "millstream.amount" $limit | float64) (include "millstream.amount" $request | float64) }}
{{ $path }}: requests.{{ $name }} is {{ $request }} and limits.{{ $name }} is {{ $limit }}; a limit can't be below its request
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A quantity as a number. */}}
{{- define "millstream.amount" -}}
{{- $units := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15
  "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- $unit := regexFind "[a-zA-Z]*$" (toString .) -}}
{{- mulf (trimSuffix $unit (toString .) | float64) (index $units $unit) -}}
{{- end -}}

{{/* Takes a list: a path, labels. */}}
{{- define "millstream.checkLabels" -}}
{{- range $name, $_ := index . 1 -}}
{{- if regexMatch "^(app\\.kubernetes\\.io/(name|instance|version|managed-by|component|part-of)|millstream\\.io/.*|helm\\.sh/chart)$" $name }}
{{ index $ 0 }}: {{ $name }} is the chart's own, by which services and policies select pods; take another name
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Labels and annotations of pods that are the chart's own: services and selectors use them. */}}
{{- define "millstream.checkPodLabels" -}}
{{- range $path, $labels := dict "podLabels" .pool.podLabels "labels" .pool.labels -}}
{{- include "millstream.checkLabels" (list (printf "%s.%s" $.pool.path $path) $labels) -}}
{{- end -}}
{{- range $name, $_ := .pool.podAnnotations -}}
{{- if has $name (list "checksum/config" "kubectl.kubernetes.io/default-container") }}
{{ $.pool.path }}.podAnnotations: {{ $name }} is the chart's own; remove it
{{- end -}}
{{- end -}}
{{- range .pool.extraVolumes -}}
{{- if regexMatch "^(config|tmp|home|shm|cache|models|model-.*|tls|client-facing-tls|client-ca|api-keys)$" .name }}
{{ $.pool.path }}.extraVolumes: {{ .name }} is the name of a volume of the chart's own; take another
{{- end -}}
{{- end -}}
{{- $volumes := dict -}}{{- /* by claim; of one that a pod names twice the kubelet waits for ever */ -}}
{{- with .pool.cache.claim -}}{{- $_ := set $volumes . "cache" -}}{{- end -}}
{{- range concat (include "millstream.modelParts" . | fromYaml).volumes .pool.extraVolumes -}}
{{- $claim := dig "persistentVolumeClaim" "claimName" "" . -}}
{{- with index $volumes $claim }}
{{ $.pool.path }}.extraVolumes: the claim {{ $claim }} is the pod's volume {{ . }} already, and one that is there twice is never mounted; remove it, and name {{ . }} in extraVolumeMounts
{{- end -}}
{{- if $claim -}}{{- $_ := set $volumes $claim .name -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* Roles that a model needs beside a pool's own. */}}
{{- define "millstream.checkPartners" -}}
{{- $pool := .pool -}}
{{- $engine := include "millstream.engine" . -}}
{{- $modes := list -}}{{- /* of all decode pools */ -}}
{{- $takers := list -}}{{- /* of those with the same engine: another's KV cache is of no use */ -}}
{{- $abilities := list -}}
{{- range .pools -}}
{{- if eq .model $pool.model -}}
{{- if eq .role "decode" -}}
{{- $mode := include "millstream.mode" (dict "root" $.root "pool" .) -}}
{{- $modes = append $modes $mode -}}
{{- if eq (include "millstream.engine" (dict "pool" .)) $engine -}}{{- $takers = append $takers $mode -}}{{- end -}}
{{- end -}}
{{- $abilities = append $abilities (has .role (list "encode" "prefill" "decode") | ternary "chats" .role) -}}
{{- end -}}
{{- end -}}
{{- if or (eq $pool.role "prefill") (and (eq $pool.role "decode") (eq (include "millstream.mode" .) "disaggregated")) -}}
{{- $other := eq $pool.role "prefill" | ternary "decode" "prefill" -}}
{{- $partner := dict "root" .root "role" $other "model" $pool.model "engine" $engine -}}
{{- $connector := include "millstream.connector" . -}}
{{- if and (include "millstream.hasPool" $partner) (not (include "millstream.hasPool" (merge (dict "connector" $connector) $partner))) }}
{{ $pool.path }}.settings.kv_connector is {{ $connector }}, and no {{ $other }} pool of model {{ $pool.model }} has the same, so its workers would never be paired; set the same in both
{{- end -}}
{{- end -}}
{{- if and (eq $pool.role "prefill") (not (has "disaggregated" $takers)) }}
{{ $pool.path }}: model {{ $pool.model }} has prefill workers, and no decode workers that take their KV cache; add a pool to `decode` with this model and settings.engine {{ $engine }} (and enabled: true), or set prefill.enabled=false
{{- end -}}
{{- if and (eq $pool.role "decode") (eq (include "millstream.mode" .) "disaggregated") (not (include "millstream.hasPool" (dict "root" .root "role" "prefill" "model" $pool.model "engine" $engine))) }}
{{ $pool.path }}.settings.mode is disaggregated, and model {{ $pool.model }} has no prefill workers; add a pool to `prefill` with this model and settings.engine {{ $engine }} (and enabled: true), or remove the mode
{{- end -}}
{{- if and (eq $pool.role "encode") (not $modes) }}
{{ $pool.path }}: model {{ $pool.model }} has encode workers, and no decode workers that read their embeddings; add a pool to `decode` with this model
{{- end -}}
{{- if gt (len (uniq $abilities)) 1 }}
model {{ $pool.model }} is used by pools for {{ $abilities | uniq | sortAlpha | join " and for " }}, and a model does one of them; add a second entry to `models` with the same uri
{{- end -}}
{{- end -}}

{{- define "millstream.checkModels" -}}
{{- $root := . -}}
{{- $served := list -}}
{{- range $key, $model := .Values.models -}}
{{- $scheme := include "millstream.scheme" ($model.uri | default "") -}}
{{- $name := $model.servedName | default $key -}}
{{- if has $name $served }}
models.{{ $key }}: another model is served as {{ $name }} too; give one of them another servedName
{{- end -}}
{{- $served = append $served $name -}}
{{- if and (include "millstream.byJob" $model) (not $model.size) }}
models.{{ $key }}.size is missing: the claim that its files are downloaded to needs one, such as 20Gi
{{- end -}}
{{- if and (eq ($model.download | default "pod") "pod") $model.storageClass (not $model.size) }}
models.{{ $key }}.size is missing: volumes of storage class {{ $model.storageClass }} need one, such as 20Gi
{{- end -}}
{{- if and (eq ($model.download | default "pod") "job") (not (has $scheme (list "hf" "s3"))) }}
models.{{ $key }}.download is job, and there is nothing to download from {{ $model.uri | default "an empty uri" | quote }}; remove download, or use an hf:// or s3:// URI
{{- end -}}
{{- if include "millstream.byJob" $model -}}
{{- include "millstream.checkClaim" (dict "root" $root "key" $key "model" $model) -}}
{{- end -}}
{{- if and $model.prune (not (include "millstream.byJob" $model)) }}
models.{{ $key }}.prune is for download: job, whose claim holds several revisions; remove it
{{- end -}}
{{- if and $model.revision (ne $scheme "hf") }}
models.{{ $key }}.revision is for hf:// URIs; remove it
{{- end -}}
{{- if and $model.revision (eq $scheme "hf") (contains "@" $model.uri) }}
models.{{ $key }} has two revisions, {{ $model.revision }} and the one in its uri; remove one of them
{{- end -}}
{{- if and (eq $scheme "oci") (not $root.Values.downloads.imageVolumes) (semverCompare "<1.35.0-0" $root.Capabilities.KubeVersion.Version) }}
models.{{ $key }}.uri is an image volume, which is on from Kubernetes 1.35 on; the cluster has {{ $root.Capabilities.KubeVersion.Version }}, and would drop the volume silently. Use hf://, s3:// or pvc://, or turn the feature gate ImageVolume on and set downloads.imageVolumes=true
{{- end -}}
{{- end -}}
{{- end -}}

{{/* What of a claim can't change, compared with the one in the cluster. */}}
{{- define "millstream.checkClaim" -}}
{{- $model := .model -}}
{{- with (lookup "v1" "PersistentVolumeClaim" .root.Release.Namespace (include "millstream.claim" (list .root .key))).spec -}}
{{- $other := "other than growing a claim can't change; add a second entry to `models` with the same uri, and name it in the pools" -}}
{{- $size := .resources.requests.storage -}}
{{- if lt (include "millstream.amount" ($model.size | default $size) | float64) (include "millstream.amount" $size | float64) }}
models.{{ $.key }}.size is {{ $model.size }}, and its claim has {{ $size }}; {{ $other }}
{{- end -}}
{{- if and $model.storageClass (ne $model.storageClass (.storageClassName | default "")) }}
models.{{ $.key }}.storageClass is {{ $model.storageClass }}, and its claim has {{ .storageClassName | default "none" }}; {{ $other }}
{{- end -}}
{{- $modes := $model.accessModes | default (list "ReadWriteMany") | join ", " -}}
{{- if ne $modes (join ", " .accessModes) }}
models.{{ $.key }}.accessModes is {{ $modes }}, and its claim has {{ join ", " .accessModes }}; {{ $other }}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "millstream.checkDownloads" -}}
{{- include "millstream.checkLabels" (list "commonLabels" .Values.commonLabels) -}}
{{- range $name, $_ := .Values.commonAnnotations -}}
{{- if regexMatch "^((meta\\.)?helm\\.sh/|leaderworkerset\\.sigs\\.k8s\\.io/|checksum/config$|kubectl\\.kubernetes\\.io/default-container$)" $name }}
commonAnnotations: {{ $name }} has a meaning of its own on each object; set it where it belongs, such as `annotations` of a pool
{{- end -}}
{{- end -}}
{{- include "millstream.checkResources" (list "downloads.resources" .Values.downloads.resources) -}}
{{- include "millstream.checkResources" (list "helmTest.resources" .Values.helmTest.resources) -}}
{{- if and .Values.downloads.imageVolumes (semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version) }}
downloads.imageVolumes is true, and image volumes need Kubernetes 1.31 or later; the cluster has {{ .Capabilities.KubeVersion.Version }}
{{- end -}}
{{- end -}}

{{- define "millstream.checkTls" -}}
{{- $tls := .Values.security.tls -}}
{{- $issuer := $tls.certManager.issuerRef.name -}}
{{- if not $tls.enabled -}}
{{- range $name := list "requireClientCertificates" "clientFacingSecret" "clientCaSecret" "existingSecret" "adminPeers" "allowedClients" "probes" -}}
{{- if index $tls $name }}
security.tls.{{ $name }} is set, and TLS is off; set security.tls.enabled=true, or remove it
{{- end -}}
{{- end -}}
{{- if $issuer }}
security.tls.certManager.issuerRef.name is set, and TLS is off; set security.tls.enabled=true, or remove it
{{- end -}}
{{- else -}}
{{- range $pool := include "millstream.pools" . | fromYamlArray -}}
{{- if not (or $issuer $tls.existingSecret (index $tls.existingSecrets $pool.role)) }}
security.tls.enabled needs certificates for the role {{ $pool.role }}; set security.tls.certManager.issuerRef.name, or security.tls.existingSecret (with tls.crt, tls.key and ca.crt)
{{- end -}}
{{- end -}}
{{- if and $issuer (or $tls.existingSecret $tls.existingSecrets) }}
security.tls has an issuer and existing secrets; remove one of them
{{- end -}}
{{- if and $issuer (not (.Capabilities.APIVersions.Has "cert-manager.io/v1")) }}
security.tls.certManager.issuerRef.name is set, and the cluster has no cert-manager; install it, or use security.tls.existingSecret. To render without a cluster add --api-versions cert-manager.io/v1
{{- end -}}
{{- if and $tls.probes (semverCompare "<1.37.0-0" .Capabilities.KubeVersion.Version) }}
security.tls.probes needs Kubernetes 1.37 or later, and the cluster has {{ .Capabilities.KubeVersion.Version }}; remove it: probes then use a plaintext port with nothing but health
{{- end -}}
{{- if and $tls.probes $tls.requireClientCertificates }}
security.tls.probes can't work with requireClientCertificates, since the kubelet has no certificate; remove one of them
{{- end -}}
{{- if and (not $tls.requireClientCertificates) (or $tls.clientCaSecret $tls.allowedClients) }}
security.tls.clientCaSecret and allowedClients need security.tls.requireClientCertificates=true
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "millstream.checkService" -}}
{{- $service := .Values.processor.service -}}
{{- if eq $service.type "ClusterIP" -}}
{{- range $name := list "nodePort" "externalTrafficPolicy" -}}
{{- if index $service $name }}
processor.service.{{ $name }} is set, and the type is ClusterIP; set processor.service.type to NodePort or LoadBalancer, or remove it
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and (ne $service.type "ClusterIP") .Values.networkPolicy.enabled (not (include "millstream.clientBlocks" .)) }}
processor.service.type is {{ $service.type }}, and networkPolicy.clients lets no addresses in, only pods; add an ipBlock: with externalTrafficPolicy=Local your clients' addresses (loadBalancerSourceRanges are let in then), else those of the nodes, or of the load balancer
{{- end -}}
{{- if ne $service.type "LoadBalancer" -}}
{{- range $name := list "loadBalancerClass" "loadBalancerSourceRanges" -}}
{{- if index $service $name }}
processor.service.{{ $name }} is set, and the type is {{ $service.type }}; set processor.service.type to LoadBalancer, or remove it
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "millstream.checkDiscovery" -}}
{{- $accounts := .Values.serviceAccount -}}
{{- if and (eq .Values.discovery.kind "endpointslices") (not $accounts.create) (not $accounts.processorName) }}
discovery.kind is endpointslices, and serviceAccount.create is false; name the Processor's account in serviceAccount.processorName, so that no other gets the right to read EndpointSlices, or set discovery.kind to dns
{{- end -}}
{{- if eq .Values.discovery.kind "dns" -}}
{{- $ttl := int .Values.discovery.dnsTtlSeconds -}}
{{- range $pool := include "millstream.pools" . | fromYamlArray -}}
{{- $ready := gt (int $pool.parallelism.nodes) 1 | ternary 0 (int $pool.rollout.minReadySeconds) -}}{{- /* LeaderWorkerSet has none */ -}}
{{- if and $pool.worker (le (add $ready $pool.drain.preStopSeconds) $ttl) }}
discovery.kind is dns, whose answers may be {{ $ttl }} s old, and {{ $pool.path }} replaces a pod after {{ add $ready $pool.drain.preStopSeconds }} s: its requests would be refused meanwhile. Set rollout.minReadySeconds or drain.preStopSeconds higher, discovery.dnsTtlSeconds to your DNS's, or discovery.kind to endpointslices
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
