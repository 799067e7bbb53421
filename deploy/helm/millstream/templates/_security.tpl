{{/* Pod Security *restricted*, for every pod. Takes (dict "pool" $pool); without a pool, of a Job. */}}
{{- define "millstream.podSecurity" -}}
{{- $rdma := dig "pool" "rdma" dict . -}}
{{- $root := and ($rdma.enabled | default false) ($rdma.runAsRoot | default false) -}}
runAsNonRoot: {{ not $root }}
runAsUser: {{ $root | ternary 0 65532 }}
runAsGroup: {{ $root | ternary 0 65532 }}
# Volumes are writable for this group, and secrets readable.
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* Takes a pool's `rdma`, or an empty dict. */}}
{{- define "millstream.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  {{- if and .enabled .ipcLock }}
  # Not allowed by Pod Security *restricted*.
  add: [IPC_LOCK]
  {{- end }}
{{- end -}}
