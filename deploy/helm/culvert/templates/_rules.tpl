{{/*
Rights, each with what it is for. What is below "of namespaces" is given in the
namespaces of values where there are any, and else in the whole cluster.
*/}}

{{/* To find services, for gateways and DNS servers alike. */}}
{{- define "culvert.discoveryRules" -}}
- apiGroups: [""]
  resources: [services]
  verbs: [list, watch]
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [list, watch]
{{- end -}}

{{/* Of the whole cluster: what is in no namespace. */}}
{{- define "culvert.discoveryClusterRules" -}}
# Annotations of Namespaces, and their labels.
- apiGroups: [""]
  resources: [namespaces]
  {{- if and .Values.namespaces (not .Values.gatewayAPI.enabled) }}
  resourceNames:
    {{- toYaml .Values.namespaces | nindent 4 }}
  {{- end }}
  verbs: [list, watch]
{{- if .Values.discovery.enabled }}
# Addresses of gateways at ports of nodes.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end }}
{{- if .Values.multiCluster.enabled }}
# When the CRDs of multi-cluster services are installed.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end }}
{{- end -}}

{{/* Of namespaces, for gateways. */}}
{{- define "culvert.gatewayRules" -}}
{{- include "culvert.discoveryRules" . }}
{{- if .Values.gatewayAPI.enabled }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways, listenersets, tlsroutes, tcproutes, udproutes, httproutes, grpcroutes, referencegrants, backendtlspolicies]
  verbs: [list, watch]
# What has a status: to look again, where somebody else wrote at the same time.
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways, listenersets, tlsroutes, tcproutes, udproutes, httproutes, grpcroutes, backendtlspolicies]
  verbs: [get]
- apiGroups: [gateway.networking.k8s.io]
  resources: [gateways/status, listenersets/status, tlsroutes/status, tcproutes/status, udproutes/status, httproutes/status, grpcroutes/status, backendtlspolicies/status]
  verbs: [update]
# Certificates and their CAs, that listeners and policies name.
- apiGroups: [""]
  resources: [secrets, configmaps]
  verbs: [list, watch]
# The object that carries the labels and annotations of a Gateway's infrastructure.
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, create, update]
# That routes may lead to.
- apiGroups: [multicluster.x-k8s.io]
  resources: [serviceimports]
  verbs: [list, watch]
{{- end }}
{{- if .Values.authorizationPolicies.enabled }}
- apiGroups: [policy.culvert.dev]
  resources: [authorizationpolicies]
  verbs: [get, list, watch]
- apiGroups: [policy.culvert.dev]
  resources: [authorizationpolicies/status]
  verbs: [update]
# Labels of what policies select.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
{{- end }}
{{- if .Values.multiCluster.enabled }}
- apiGroups: [multicluster.x-k8s.io]
  resources: [serviceexports]
  verbs: [list, watch]
- apiGroups: [multicluster.x-k8s.io]
  resources: [serviceimports]
  verbs: [list, watch, create, update, delete]
- apiGroups: [multicluster.x-k8s.io]
  resources: [serviceexports/status, serviceimports/status]
  verbs: [update]
{{- end }}
# Refusals that an operator should see.
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}

{{- define "culvert.gatewayClusterRules" -}}
{{- include "culvert.discoveryClusterRules" . }}
{{- if .Values.gatewayAPI.enabled }}
{{- if and (not .Values.discovery.enabled) .Values.gateway.service.enabled (eq .Values.gateway.service.type "NodePort") }}
# Addresses of Gateways at ports of nodes.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
{{- end }}
- apiGroups: [gateway.networking.k8s.io]
  resources: [gatewayclasses]
  verbs: [get, list, watch]
- apiGroups: [gateway.networking.k8s.io]
  resources: [gatewayclasses/status]
  verbs: [update]
# Which version of Gateway API the CRDs are of, and when one is installed. A list
# can't be limited to names of several.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [get, list, watch]
{{- end }}
{{- if .Values.authorizationPolicies.enabled }}
- apiGroups: [policy.culvert.dev]
  resources: [clusterauthorizationpolicies]
  verbs: [get, list, watch]
- apiGroups: [policy.culvert.dev]
  resources: [clusterauthorizationpolicies/status]
  verbs: [update]
{{- if not .Values.gatewayAPI.enabled }}
# When the CRDs of policies are installed.
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end }}
{{- end }}
{{- end -}}

{{/* Of namespaces, for DNS servers. */}}
{{- define "culvert.dnsRules" -}}
{{- include "culvert.discoveryRules" . }}
{{- if .Values.multiCluster.enabled }}
- apiGroups: [multicluster.x-k8s.io]
  resources: [serviceexports, serviceimports]
  verbs: [list, watch]
{{- end }}
{{- end -}}

{{/* Who is given a role. Of (list $ kind name account). */}}
{{- define "culvert.binding" -}}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ index . 1 }}
  name: {{ index . 2 | quote }}
subjects:
  - kind: ServiceAccount
    name: {{ index . 3 }}
    namespace: {{ (index . 0).Release.Namespace }}
{{- end -}}

{{/*
The rights of one account. Of (list $ component name clusterName account
rulesOfNamespaces rulesOfTheCluster).
*/}}
{{- define "culvert.rbac" -}}
{{- $root := index . 0 }}
{{- $component := index . 1 }}
{{- $name := index . 2 }}
{{- $clusterName := index . 3 }}
{{- $account := index . 4 }}
{{- $rules := index . 5 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $clusterName | quote }}
  labels:
    {{- include "culvert.labels" (list $root $component) | nindent 4 }}
rules:
  {{- index . 6 | nindent 2 }}
  {{- if not $root.Values.namespaces }}
  {{- $rules | nindent 2 }}
  {{- end }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $clusterName | quote }}
  labels:
    {{- include "culvert.labels" (list $root $component) | nindent 4 }}
{{ include "culvert.binding" (list $root "ClusterRole" $clusterName $account) }}
{{- range $namespace := $root.Values.namespaces }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $clusterName | quote }}
  namespace: {{ $namespace }}
  labels:
    {{- include "culvert.labels" (list $root $component) | nindent 4 }}
rules:
  {{- $rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $clusterName | quote }}
  namespace: {{ $namespace }}
  labels:
    {{- include "culvert.labels" (list $root $component) | nindent 4 }}
{{ include "culvert.binding" (list $root "Role" $clusterName $account) }}
{{- end }}
{{- with $root.Values.discovery.clusters }}
{{- if $root.Values.discovery.enabled }}
---
# Kubeconfigs of further clusters, and no other Secrets than those of this namespace.
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ printf "%s:clusters" $clusterName | quote }}
  namespace: {{ . }}
  labels:
    {{- include "culvert.labels" (list $root $component) | nindent 4 }}
rules:
  - apiGroups: [""]
    resources: [secrets]
    verbs: [list, watch]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ printf "%s:clusters" $clusterName | quote }}
  namespace: {{ . }}
  labels:
    {{- include "culvert.labels" (list $root $component) | nindent 4 }}
{{ include "culvert.binding" (list $root "Role" (printf "%s:clusters" $clusterName) $account) }}
{{- end }}
{{- end }}
{{- end -}}
