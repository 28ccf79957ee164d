{{/* The pod of a role's server; with "node" one of the further machines of a role that spans several: it runs ranks, and answers nobody. */}}
{{- define "lookahead.rolePod" -}}
{{- $ := .root -}}
{{- $of := .of -}}
{{- $spans := gt (int $of.nodes) 1 -}}
{{ include "lookahead.podSecurity" $ }}
shareProcessNamespace: true
terminationGracePeriodSeconds: {{ include "lookahead.grace" $ }}
{{- include "lookahead.placement" $of }}
containers:
  - name: {{ ternary "node" .role .node }}
    image: {{ include "lookahead.image" $ }}
    imagePullPolicy: {{ $.Values.image.pullPolicy }}
    {{- include "lookahead.containerSecurity" $ | nindent 4 }}
    {{- if .node }}
    command: [lookahead, node]
    args: []
    {{- else }}
    command: [lookahead, serve]
    args:
      - --spec={{ $.Values.spec.name }}
      - --role={{ .role }}
      - --host=0.0.0.0
      - --log-file=/dev/stderr
      {{- if $.Values.roles.tlsSecret }}
      - --tls-cert=/run/secrets/tls/tls.crt
      - --tls-key=/run/secrets/tls/tls.key
      {{- end }}
    {{- end }}
    env:
      {{- if not .node }}
      {{- include "lookahead.engineKey" $ | nindent 6 }}
      {{- end }}
      {{- if $spans }}
      - {name: LOOKAHEAD_NODE_KEY_FILE, value: /run/secrets/node/{{ $.Values.roles.nodeKeySecret.key }}}
      {{- end }}
      {{- with $.Values.env }}{{ toYaml . | nindent 6 }}{{ end }}
    {{- if .node }}
    ports:
      - {name: ssh, containerPort: 2222}
    {{- else }}
    ports:
      - {name: http, containerPort: 8000}
      - {name: grpc, containerPort: 8001}
      - {name: metrics, containerPort: 8002}
    # A leader waits for its nodes as long as for its models.
    startupProbe:
      httpGet: {path: /v2/health/ready, port: http}
      periodSeconds: 10
      timeoutSeconds: 6
      failureThreshold: {{ div (add (mul (ternary 2 1 $spans) (int $.Values.spec.loadTimeoutSeconds)) 129) 10 }}
    readinessProbe:
      httpGet: {path: /v2/health/ready, port: http}
      periodSeconds: 5
      timeoutSeconds: 6
    livenessProbe:
      httpGet: {path: /v2/health/live, port: http}
      periodSeconds: 10
      timeoutSeconds: 6
      failureThreshold: 6
    lifecycle: {preStop: {sleep: {seconds: 5}}}
    {{- end }}
    resources: {{ include "lookahead.resources" $of }}
    volumeMounts:
      {{- include "lookahead.mounts" (dict "root" $ "write" false) | nindent 6 }}
      {{- if $spans }}
      - {name: node-key, mountPath: /run/secrets/node, readOnly: true}
      {{- end }}
      {{- if not .node }}
      - {name: engine-key, mountPath: /run/secrets/engine, readOnly: true}
      {{- if $.Values.roles.tlsSecret }}
      - {name: tls, mountPath: /run/secrets/tls, readOnly: true}
      {{- end }}
      {{- end }}
volumes:
  {{- include "lookahead.volumes" (dict "root" $ "part" $of) | nindent 2 }}
  {{- if $spans }}
  # Root's, and readable to the group: ssh refuses a key of its own user that others may read.
  - name: node-key
    secret: {secretName: {{ required "roles.nodeKeySecret.name: a role with nodes above 1 needs the key of its nodes" $.Values.roles.nodeKeySecret.name }}, defaultMode: 0440}
  {{- end }}
  {{- if not .node }}
  - name: engine-key
    secret: {secretName: {{ $.Values.roles.keySecret.name }}, defaultMode: 0440}
  {{- if $.Values.roles.tlsSecret }}
  - name: tls
    secret: {secretName: {{ $.Values.roles.tlsSecret }}, defaultMode: 0440}
  {{- end }}
  {{- end }}
{{- end }}

{{/* Labels and annotations of a role's pods. Where the roles are found is the loop's alone to know: another number of replicas starts no role anew. */}}
{{- define "lookahead.roleMeta" -}}
{{- $ := .root -}}
labels: {{- include "lookahead.labels" $ | nindent 2 }}
  app.kubernetes.io/component: {{ .role }}
annotations:
  checksum/settings: {{ regexReplaceAll "(?m)^url = .*$" (include "lookahead.spec" $) "" | sha256sum }}
  {{- with $.Values.podAnnotations }}{{ toYaml . | nindent 2 }}{{ end }}
{{- end }}
