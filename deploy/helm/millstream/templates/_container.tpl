{{/* The container of a pool's pods: one process of its service. */}}
{{- define "millstream.container" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $image := include "millstream.imageOf" . -}}
name: {{ $pool.role }}
image: {{ include "millstream.image" (dict "root" $root "image" $image) | quote }}
imagePullPolicy: {{ (index $root.Values.image $image).pullPolicy }}
# No `command`: the images' entry point is an init process, which passes signals on and reaps orphans.
args: ["python", "-m", "millstream_server.{{ $pool.role }}", "--config", "/etc/millstream/config.yaml"]
env:
  {{- include "millstream.environment" . | fromYamlArray | include "millstream.lastWins" | nindent 2 }}
{{- with $pool.envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - {name: grpc, containerPort: 50051}
  - {name: metrics, containerPort: 9464}
  {{- if eq (include "millstream.probePort" .) "50052" }}
  - {name: health, containerPort: 50052}
  {{- end }}
  {{- if eq $pool.role "prefill" }}
  - {name: bootstrap, containerPort: 8998}
  {{- range $rank := untilStep 1 (include "millstream.bootstrapPorts" . | int) 1 }}
  - {name: bootstrap-{{ $rank }}, containerPort: {{ add 8998 $rank }}}
  {{- end }}
  {{- end }}
  {{- if gt (int $pool.parallelism.nodes) 1 }}
  - {name: rendezvous, containerPort: 20000}
  {{- end }}
{{- include "millstream.probes" . | nindent 0 }}
{{- /* `kubectl describe pod` then shows why a process ended: its last lines. */}}
terminationMessagePolicy: FallbackToLogsOnError
lifecycle:
  preStop:
    sleep: {seconds: {{ int $pool.drain.preStopSeconds }}}
resources:
  {{- include "millstream.resources" . | nindent 2 }}
securityContext:
  {{- include "millstream.containerSecurity" $pool.rdma | nindent 2 }}
volumeMounts:
  - {name: config, mountPath: /etc/millstream/config.yaml, subPath: config.yaml, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  - {name: home, mountPath: /home/millstream}
  {{- if or $pool.cache.claim $pool.cache.hostPath }}
  - {name: cache, mountPath: /home/millstream/.cache}
  {{- end }}
  {{- if $pool.shm.size }}
  - {name: shm, mountPath: /dev/shm}
  {{- end }}
  {{- range $name, $secret := .secrets }}
  - {name: {{ $name }}, mountPath: /etc/millstream/{{ $name }}, readOnly: true}
  {{- end }}
  {{- with concat .parts.mounts $pool.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "millstream.environment" -}}
{{- $pool := .pool -}}
- {name: HOME, value: /home/millstream}
# Files come with the model; an engine that looks for more of them must fail at once.
- {name: HF_HUB_OFFLINE, value: "1"}
{{- if has $pool.role (list "prefill" "decode") }}
- name: MILLSTREAM_BOOTSTRAP_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- if has $pool.role (list "processor" "encode" "prefill" "decode") }}
- name: MILLSTREAM_TICKET_KEY
  valueFrom: {secretKeyRef: {{ include "millstream.ticketKey" .root }}}
{{- end }}
{{- if gt (int $pool.parallelism.nodes) 1 }}
- name: MILLSTREAM_NODE_RANK
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
# LeaderWorkerSet puts LWS_LEADER_ADDRESS before all others.
- {name: MILLSTREAM_LEADER_ADDRESS, value: "$(LWS_LEADER_ADDRESS):20000"}
{{- end }}
{{- if or $pool.cache.claim $pool.cache.hostPath }}
# Those that don't write to ~/.cache by themselves.
- {name: TRITON_CACHE_DIR, value: /home/millstream/.cache/triton}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /home/millstream/.cache/torchinductor}
{{- end }}
{{- with $pool.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "millstream.ticketKey" -}}
{{- $ticket := .Values.security.ticketKey -}}
{name: {{ $ticket.existingSecret | default (include "millstream.fit" (list . "ticket-key")) | quote }}, key: {{ empty $ticket.existingSecret | ternary "ticket-key" $ticket.key | quote }}}
{{- end -}}

{{/* The port that the kubelet probes: with TLS one of its own, unless the kubelet can speak TLS. */}}
{{- define "millstream.probePort" -}}
{{- and .root.Values.security.tls.enabled (not (include "millstream.probesTls" .)) | ternary "50052" "50051" -}}
{{- end -}}

{{/*
Native gRPC probes by service name. Startup and readiness ask for the role's service: a worker that
loads, is stuck or drains gets nothing new, and isn't killed. Liveness only asks whether the process
responds. The Processor's own service is SERVING while every model has its workers. Its start doesn't
wait for that, or it would be restarted while a large model loads. Its readiness does with one model;
with several, one model without workers must not take the others away, so it is asked whether it takes
requests at all.
*/}}
{{- define "millstream.probes" -}}
{{- $probes := .pool.probes -}}
{{- $service := printf "millstream.v1.%sService" (title .pool.role) -}}
{{- $readiness := $service -}}
{{- if and (not .pool.worker) (gt (len (include "millstream.servedModels" .root | fromYaml)) 1) -}}
{{- $readiness = "accepting" -}}
{{- end -}}
startupProbe:
  grpc: {{ include "millstream.grpc" (dict "of" . "service" (.pool.worker | ternary $service "liveness")) }}
  periodSeconds: {{ int $probes.startup.periodSeconds }}
  timeoutSeconds: {{ int $probes.startup.timeoutSeconds }}
  failureThreshold: {{ divf $probes.startup.limitSeconds $probes.startup.periodSeconds | ceil | int }}
readinessProbe:
  grpc: {{ include "millstream.grpc" (dict "of" . "service" ($probes.readiness.service | default $readiness)) }}
  {{- omit $probes.readiness "service" | toYaml | nindent 2 }}
livenessProbe:
  grpc: {{ include "millstream.grpc" (dict "of" . "service" "liveness") }}
  {{- toYaml $probes.liveness | nindent 2 }}
{{- end -}}

{{- define "millstream.grpc" -}}
{{- $action := dict "port" (include "millstream.probePort" .of | int) "service" .service -}}
{{- if include "millstream.probesTls" .of -}}
{{- $_ := set $action "mode" "TLS" -}}
{{- end -}}
{{- $action | toJson -}}
{{- end -}}
