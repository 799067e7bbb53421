{{/* The secret with a role's certificate. Takes (list $root "decode"). */}}
{{- define "millstream.tlsSecret" -}}
{{- $tls := (index . 0).Values.security.tls -}}
{{- $own := include "millstream.fit" (list (index . 0) (printf "%s-tls" (index . 1))) -}}
{{- index $tls.existingSecrets (index . 1) | default ($tls.existingSecret | default $own) -}}
{{- end -}}

{{/* The name by which a role's certificate is known to its peers. Takes (list $root "decode"). */}}
{{- define "millstream.identity" -}}
{{- $root := index . 0 -}}
{{- $own := printf "%s.%s.svc" (include "millstream.fit" .) $root.Release.Namespace -}}
{{- index $root.Values.security.tls.identities (index . 1) | default $own -}}
{{- end -}}

{{/* The name in all workers' certificates, which stands for the bare addresses of pods. */}}
{{- define "millstream.workerName" -}}
{{- $own := printf "%s.%s.svc" (include "millstream.fit" (list . "workers")) .Release.Namespace -}}
{{- .Values.security.tls.workerName | default $own -}}
{{- end -}}

{{/* "true" where the kubelet can probe the service's own port with TLS; it has no client certificate. */}}
{{- define "millstream.probesTls" -}}
{{- $tls := .root.Values.security.tls -}}
{{- if and $tls.enabled $tls.probes (not .pool.worker) (not $tls.requireClientCertificates) -}}true{{- end -}}
{{- end -}}

{{/* "true" where processes open the admin port: with TLS it takes the named peers only, so without names there is none. */}}
{{- define "millstream.adminPort" -}}
{{- $tls := .Values.security.tls -}}
{{- if or (not $tls.enabled) $tls.adminPeers -}}true{{- end -}}
{{- end -}}

{{/* Settings for TLS. Who may call follows the graph of roles: the Processor calls every worker,
prefill and decode workers call encode workers. */}}
{{- define "millstream.tlsSettings" -}}
{{- $root := .root -}}
{{- $tls := $root.Values.security.tls -}}
{{- $own := "/etc/millstream/tls" -}}
{{- if $tls.enabled -}}
{{- if not (include "millstream.probesTls" .) }}
health_listen: 0.0.0.0:50052
{{- end }}
{{- with $tls.adminPeers }}
admin_client_ca_file: {{ $own }}/ca.crt
admin_peers: {{ toJson . }}
{{- end }}
{{- if .pool.worker }}
tls_cert_file: {{ $own }}/tls.crt
tls_key_file: {{ $own }}/tls.key
tls_client_ca_file: {{ $own }}/ca.crt
{{- $callers := list (include "millstream.identity" (list $root "processor")) }}
{{- if eq .pool.role "encode" }}
{{- $callers = append $callers (include "millstream.identity" (list $root "prefill")) }}
{{- $callers = append $callers (include "millstream.identity" (list $root "decode")) }}
{{- end }}
allowed_peers: {{ uniq $callers | toJson }}
{{- if has .pool.role (list "prefill" "decode") }}
encode_tls_dir: {{ $own }}
encode_tls_name: {{ include "millstream.workerName" $root | quote }}
{{- end }}
{{- else }}
{{- $shown := empty $tls.clientFacingSecret | ternary $own "/etc/millstream/client-facing-tls" }}
tls_cert_file: {{ $shown }}/tls.crt
tls_key_file: {{ $shown }}/tls.key
{{- if $tls.requireClientCertificates }}
tls_client_ca_file: {{ empty $tls.clientCaSecret | ternary $own "/etc/millstream/client-ca" }}/ca.crt
{{- with $tls.allowedClients }}
allowed_peers: {{ toJson . }}
{{- end }}
{{- end }}
worker_tls_dir: {{ $own }}
worker_tls_name: {{ include "millstream.workerName" $root | quote }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Secrets that a pool's pods mount below /etc/millstream, as {name: {secret, items}}. */}}
{{- define "millstream.secretMounts" -}}
{{- $security := .root.Values.security -}}
{{- if $security.tls.enabled }}
tls: {secretName: {{ include "millstream.tlsSecret" (list .root .pool.role) | quote }}}
{{- if and (not .pool.worker) $security.tls.clientFacingSecret }}
client-facing-tls: {secretName: {{ $security.tls.clientFacingSecret | quote }}}
{{- end }}
{{- if and (not .pool.worker) $security.tls.requireClientCertificates $security.tls.clientCaSecret }}
client-ca: {secretName: {{ $security.tls.clientCaSecret | quote }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end }}
{{- if and (not .pool.worker) $security.apiKeys.enabled }}
api-keys:
  secretName: {{ $security.apiKeys.existingSecret | default (include "millstream.fit" (list .root "api-keys")) | quote }}
  items: [{key: {{ $security.apiKeys.key | quote }}, path: api-keys}]
{{- end }}
{{- end -}}
