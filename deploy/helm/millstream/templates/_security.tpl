{{/* Pod Security *restricted*, for every pod. Takes (dict "root" $ "pool" $pool); without a pool, of a Job. */}}
{{- define "millstream.podSecurity" -}}
{{- $rdma := dig "pool" "rdma" dict . -}}
{{- $root := and ($rdma.enabled | default false) ($rdma.runAsRoot | default false) -}}
{{- $ids := .root.Values.security.runAs | default dict -}}
runAsNonRoot: {{ not $root }}
{{- range $field, $id := dict "runAsUser" $ids.user "runAsGroup" $ids.group }}
{{- if or $root (not (kindIs "invalid" $id)) }}
{{ $field }}: {{ $root | ternary 0 (int64 $id) }}
{{- end }}
{{- end }}
{{- if not (kindIs "invalid" $ids.fsGroup) }}
# Volumes are writable for this group, and secrets readable.
fsGroup: {{ int64 $ids.fsGroup }}
{{- end }}
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
