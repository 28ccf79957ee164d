{{- define "lookahead.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "lookahead.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "lookahead.selector" . }}
{{- end }}

{{- define "lookahead.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "lookahead.image" -}}
{{- $kind := ternary "trtllm" "cpu" (or .Values.roles.enabled (gt (int .Values.server.gpus) 0)) -}}
{{ required "image.repository: name your image" .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" $kind .Chart.AppVersion) }}
{{- end }}

{{/* The spec as a file of the chart's: where one is given, or roles live apart. Empty: the image's own is served. */}}
{{- define "lookahead.spec" -}}
{{- $text := .Values.spec.toml | default (.Files.Get (printf "files/specs/%s.toml" .Values.spec.name)) -}}
{{- if .Values.roles.enabled -}}
{{- $text = required "spec: with roles.enabled the chart needs its text: --set-file spec.toml=FILE" $text -}}
{{- $scheme := ternary "grpcs" "grpc" (ne .Values.roles.tlsSecret "") -}}
{{- $sections := list -}}
{{- range $section := splitList "\n[" $text -}}
{{- range $role := list "target" "draft" "judge" -}}
{{- if hasPrefix (printf "%s]" $role) $section -}}
{{- $of := index $.Values.roles $role -}}
{{- $name := include "lookahead.roleSet" (dict "root" $ "role" $role "of" $of) -}}
{{- $urls := list -}}
{{- range $i := until (int $of.replicas) -}}
{{- $urls = append $urls (printf "%s://%s-%d.%s:8001" $scheme $name $i $name) -}}
{{- end -}}
{{- $section = regexReplaceAll "(?m)^url = (\\[[^\\]]*\\]|.*)$" $section "" -}}
{{- $section = printf "%s]\nurl = %s%s" $role (toJson $urls) (trimPrefix (printf "%s]" $role) $section) -}}
{{- $cards := printf "gpu_device_ids = %s" (toJson (until (int $of.gpus))) -}}
{{- $section = regexReplaceAll "gpu_device_ids = \\[[^\\]]*\\]" $section $cards -}}
{{- $section = regexReplaceAll "(?m)^num_nodes = .*$" $section "" -}}
{{- if gt (int $of.nodes) 1 -}}
{{- $section = replace $cards (printf "num_nodes = %d\n%s" (int $of.nodes) $cards) $section -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $sections = append $sections $section -}}
{{- end -}}
{{- join "\n[" $sections -}}
{{- else -}}
{{- $text -}}
{{- end -}}
{{- end }}

{{/* The name of what owns a role's pods, and of the Service that names them. Where a role spans nodes it is another, so that an upgrade can go either way. */}}
{{- define "lookahead.roleSet" -}}
{{- if and (gt (int .of.nodes) 1) (gt (len (include "lookahead.fullname" .root)) 36) }}{{ fail (printf "roles.%s.nodes: a shorter name of the release, please: Kubernetes labels pods of several nodes with names of at most 63 characters" .role) }}{{ end -}}
{{ include "lookahead.fullname" .root }}-{{ .role }}{{ if gt (int .of.nodes) 1 }}-nodes{{ end }}
{{- end }}

{{- define "lookahead.podSecurity" -}}
automountServiceAccountToken: false
serviceAccountName: {{ include "lookahead.fullname" . }}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "lookahead.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "lookahead.placement" -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" }}
{{- with index $ $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{/* The resources of a server, with its cards. */}}
{{- define "lookahead.resources" -}}
{{- $gpus := int .gpus -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- if gt $gpus 0 -}}
{{- $_ := set $resources "limits" (set ($resources.limits | default dict) "nvidia.com/gpu" $gpus) -}}
{{- end -}}
{{ toJson $resources }}
{{- end }}

{{/* For a pod without cards: NVIDIA's image, where it asks for none, may be shown every card of the node. */}}
{{- define "lookahead.noCards" -}}
- {name: NVIDIA_VISIBLE_DEVICES, value: void}
{{- end }}

{{/* Mounts of engines, checkpoints and the spec; "write" says that a build writes. */}}
{{- define "lookahead.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if .root.Values.checkpoints.enabled }}
- {name: checkpoints, mountPath: /opt/lookahead/checkpoints, readOnly: true}
{{- end }}
{{- if .root.Values.engines.enabled }}
- {name: engines, mountPath: /opt/lookahead/engines/built{{ if not .write }}, readOnly: true{{ end }}}
{{- end }}
{{- if include "lookahead.spec" .root }}
- {name: settings, mountPath: /opt/lookahead/engines/{{ .root.Values.spec.name }}.toml, subPath: spec.toml, readOnly: true}
{{- end }}
{{- end }}

{{- define "lookahead.volumes" -}}
- name: tmp
  emptyDir: {medium: Memory, sizeLimit: {{ .part.tmp }}}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .part.shm }}}
{{- range $kind := list "checkpoints" "engines" }}
{{- $volume := index $.root.Values $kind }}
{{- if $volume.enabled }}
- name: {{ $kind }}
  persistentVolumeClaim: {claimName: {{ $volume.claim | default (printf "%s-%s" (include "lookahead.fullname" $.root) $kind) }}}
{{- end }}
{{- end }}
- name: settings
  configMap: {name: {{ include "lookahead.fullname" .root }}}
{{- end }}

{{- define "lookahead.engineKey" -}}
- {name: LOOKAHEAD_ENGINE_KEY_FILE, value: /run/secrets/engine/{{ .Values.roles.keySecret.key }}}
{{- end }}

{{/* Seconds until all roles may be there: the leader of one that spans nodes waits for these as long as for its models. */}}
{{- define "lookahead.loadSeconds" -}}
{{- with .Values.roles -}}
{{- $times := ternary (min 2 (max (int .target.nodes) (int .draft.nodes) (int .judge.nodes))) 1 .enabled -}}
{{ mul $times (int $.Values.spec.loadTimeoutSeconds) }}
{{- end -}}
{{- end }}

{{/* Seconds from SIGTERM to SIGKILL: the sleep before it, the spec's drain, and what Triton takes to end. */}}
{{- define "lookahead.grace" -}}
{{ add 5 (int .Values.spec.exitTimeoutSeconds) 30 }}
{{- end }}

{{/* Share of taken places, for more where fewer drafted steps than usual are accepted. At most usual over 0.1. No steps, no correction. */}}
{{- define "lookahead.load" -}}
{{- $of := printf "namespace=%q,service=%q" .Release.Namespace (include "lookahead.fullname" .) -}}
{{- $acceptance := printf "sum(rate(lr_steps_total{%s,origin=\"draft\"}[10m])) / sum(rate(lr_steps_total{%s,origin=~\"draft|correction\",reason!=\"draft_error\"}[10m]))" $of $of -}}
{{- $usual := .Values.autoscaling.usualAcceptance -}}
sum(lr_requests_in_flight{ {{- $of -}} }) / sum(lr_requests_in_flight_limit{ {{- $of -}} }) * (({{ $usual }} / clamp({{ $acceptance }} >= 0, 0.1, {{ $usual }})) or vector(1))
{{- end }}
