{{/*
The workload of one pool of any role: a Deployment, or a LeaderWorkerSet where one engine spans nodes.
Takes (dict "root" $ "pool" $pool).
*/}}
{{- define "millstream.workload" -}}
{{- $pool := .pool -}}
{{- $groups := gt (int $pool.parallelism.nodes) 1 -}}
apiVersion: {{ $groups | ternary "leaderworkerset.x-k8s.io/v1" "apps/v1" }}
kind: {{ $groups | ternary "LeaderWorkerSet" "Deployment" }}
metadata:
  {{- $labels := merge (include "millstream.poolLabels" . | fromYaml) $pool.labels }}
  {{- $exclusive := dict "leaderworkerset.sigs.k8s.io/exclusive-topology" $pool.groups.topologyKey }}
  {{- $annotations := merge (dict) $pool.annotations (and $groups $pool.groups.exclusive | ternary $exclusive dict) }}
  {{- include "millstream.metadata" (dict "root" .root "name" $pool.fullname "labels" $labels "annotations" $annotations) | nindent 2 }}
spec:
  {{- with include "millstream.replicas" . }}
  replicas: {{ . }}
  {{- end }}
  {{- if $groups }}
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration:
      {{- pick $pool.rollout "maxSurge" "maxUnavailable" | toYaml | nindent 6 }}
  leaderWorkerTemplate:
    size: {{ int $pool.parallelism.nodes }}
    # The parts of a model can't go on without each other.
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      {{- include "millstream.podTemplate" . | nindent 6 }}
    workerTemplate:
      {{- include "millstream.podTemplate" (set (deepCopy .) "follower" true) | nindent 6 }}
  {{- else }}
  revisionHistoryLimit: 5
  minReadySeconds: {{ int $pool.rollout.minReadySeconds }}
  progressDeadlineSeconds: {{ include "millstream.progressDeadlineSeconds" . }}
  strategy:
    type: RollingUpdate
    rollingUpdate:
      {{- pick $pool.rollout "maxSurge" "maxUnavailable" | toYaml | nindent 6 }}
  selector:
    matchLabels:
      {{- include "millstream.selector" . | nindent 6 }}
  template:
    {{- include "millstream.podTemplate" . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* After this a rollout that doesn't go on is reported as failed: a download, a start and a drain. */}}
{{- define "millstream.progressDeadlineSeconds" -}}
{{- $startup := int .pool.probes.startup.limitSeconds -}}
{{- add $startup (int .root.Values.downloads.limitSeconds) (include "millstream.grace" . | int) -}}
{{- end -}}

{{/* Takes (dict "root" $ "pool" $pool), with "follower" true for the pods of a group but the first. */}}
{{- define "millstream.podTemplate" -}}
{{- $root := .root -}}
{{- $pool := .pool -}}
{{- $parts := include "millstream.modelParts" . | fromYaml -}}
{{- $secrets := include "millstream.secretMounts" . | fromYaml -}}
{{- $annotations := dict "kubectl.kubernetes.io/default-container" $pool.role "checksum/config" (include "millstream.settings" . | sha256sum) -}}
{{- $labels := include "millstream.poolLabels" . | fromYaml -}}
{{- if and $pool.worker (not .follower) -}}{{- $_ := set $labels "millstream.io/worker" "true" -}}{{- end -}}
metadata:
  annotations:
    {{- merge $annotations $pool.podAnnotations $root.Values.commonAnnotations | toYaml | nindent 4 }}
  # Without the chart's version: a change of the chart alone must not restart engines.
  labels:
    {{- omit (merge $labels $pool.podLabels (include "millstream.labels" $root | fromYaml)) "helm.sh/chart" | toYaml | nindent 4 }}
spec:
  serviceAccountName: {{ include "millstream.serviceAccount" . | quote }}
  automountServiceAccountToken: {{ and (not $pool.worker) (eq $root.Values.discovery.kind "endpointslices") }}
  # A service named millstream-… would become variables MILLSTREAM_…, which are settings.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "millstream.grace" . }}
  securityContext:
    {{- include "millstream.podSecurity" . | nindent 4 }}
  {{- with $root.Values.imagePullSecrets }}
  imagePullSecrets: {{ toJson . }}
  {{- end }}
  {{- with $pool.schedulerName }}
  schedulerName: {{ . | quote }}
  {{- end }}
  {{- if $pool.hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with $pool.dnsConfig }}
  dnsConfig:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with $pool.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with $pool.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $pool.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "millstream.affinity" . | fromYaml }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with include "millstream.spread" . | fromYamlArray }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $sidecars := list }}
  {{- range $pool.sidecars }}{{ $sidecars = append $sidecars (merge (dict "restartPolicy" "Always") .) }}{{ end }}
  {{- with concat $sidecars $pool.initContainers $parts.init }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - {{ include "millstream.container" (merge (dict "parts" $parts "secrets" $secrets) .) | nindent 6 | trim }}
  volumes:
    - name: config
      configMap: {name: {{ $pool.fullname }}}
    - name: tmp
      emptyDir: {}
    - name: home
      emptyDir: {}
    {{- if $pool.cache.claim }}
    - name: cache
      persistentVolumeClaim: {claimName: {{ $pool.cache.claim | quote }}}
    {{- else if $pool.cache.hostPath }}
    - name: cache
      hostPath: {path: {{ $pool.cache.hostPath | quote }}, type: Directory}
    {{- end }}
    {{- if $pool.shm.size }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $pool.shm.size }}}
    {{- end }}
    {{- range $name, $secret := $secrets }}
    - name: {{ $name }}
      secret: {{ merge (dict "defaultMode" 0440) $secret | toJson }}
    {{- end }}
    {{- with concat $parts.volumes $pool.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* How a pool's pods are spread over nodes and zones. Of a group its leader, which the others follow. */}}
{{- define "millstream.spread" -}}
{{- $constraints := list -}}
{{- $labels := include "millstream.selector" . | fromYaml -}}
{{- $added := dict "labelSelector" (dict "matchLabels" $labels) -}}
{{- if gt (int .pool.parallelism.nodes) 1 -}}
{{- $_ := set $labels "millstream.io/worker" "true" -}}
{{- else -}}
{{- /* Pods of before an upgrade don't count. */ -}}
{{- $_ := set $added "matchLabelKeys" (list "pod-template-hash") -}}
{{- end -}}
{{- range ternary list .pool.topologySpread (hasKey . "follower") -}}
{{- $constraints = append $constraints (merge (deepCopy .) $added) -}}
{{- end -}}
{{- $constraints | toYaml -}}
{{- end -}}

{{/* A pool's affinity; the pods of a group also prefer to be near each other. */}}
{{- define "millstream.affinity" -}}
{{- $affinity := deepCopy .pool.affinity -}}
{{- $key := .pool.groups.topologyKey -}}
{{- if and $key (gt (int .pool.parallelism.nodes) 1) (semverCompare ">=1.31.0-0" .root.Capabilities.KubeVersion.Version) -}}
{{- $selector := dict "matchLabels" (include "millstream.selector" . | fromYaml) -}}
{{- $term := dict "topologyKey" $key "labelSelector" $selector "matchLabelKeys" (list "leaderworkerset.sigs.k8s.io/group-key") -}}
{{- $pods := $affinity.podAffinity | default dict -}}
{{- $preferred := append ($pods.preferredDuringSchedulingIgnoredDuringExecution | default list) (dict "weight" 100 "podAffinityTerm" $term) -}}
{{- $_ := set $affinity "podAffinity" (set $pods "preferredDuringSchedulingIgnoredDuringExecution" $preferred) -}}
{{- end -}}
{{- $affinity | toYaml -}}
{{- end -}}

{{- define "millstream.serviceAccount" -}}
{{- $accounts := .root.Values.serviceAccount -}}
{{- if .pool.worker -}}
{{- $accounts.create | ternary (include "millstream.fit" (list .root "worker")) ($accounts.name | default "default") -}}
{{- else -}}
{{- $accounts.create | ternary (include "millstream.fit" (list .root "processor")) ($accounts.processorName | default "default") -}}
{{- end -}}
{{- end -}}
