package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// environment is what the container's program gets, with the API server's
// address as a client in the cluster expects it.
func (c *container) environment(pod *corev1.Pod) ([]string, error) {
	env := map[string]string{
		"PATH":                    "/",
		"HOSTNAME":                pod.Name,
		"KUBERNETES_SERVICE_HOST": nth(c.w.k.c.PodCIDR, 1).String(),
		"KUBERNETES_SERVICE_PORT": "6443",
	}
	for _, from := range c.spec.EnvFrom {
		values, err := c.w.k.values(pod.Namespace, from)
		if err != nil {
			return nil, err
		}
		for k, v := range values {
			env[from.Prefix+k] = v
		}
	}
	for _, e := range c.spec.Env {
		v, skip := expand(e.Value, env), false
		if e.ValueFrom != nil {
			var err error
			if v, skip, err = c.valueFrom(pod, e.ValueFrom); err != nil {
				return nil, fmt.Errorf("variable %s: %w", e.Name, err)
			}
		}
		if !skip {
			env[e.Name] = v
		}
	}
	list := make([]string, 0, len(env))
	for _, k := range slices.Sorted(maps.Keys(env)) {
		list = append(list, k+"="+env[k])
	}
	return list, nil
}

// values are those of envFrom.
func (k *kubelet) values(namespace string, from corev1.EnvFromSource) (map[string]string, error) {
	values := map[string]string{}
	switch {
	case from.SecretRef != nil:
		s, err := k.secrets.Secrets(namespace).Get(from.SecretRef.Name)
		if err != nil {
			if value(from.SecretRef.Optional, false) {
				return nil, nil
			}
			return nil, err
		}
		for key, v := range s.Data {
			values[key] = string(v)
		}
	case from.ConfigMapRef != nil:
		m, err := k.configMaps.ConfigMaps(namespace).Get(from.ConfigMapRef.Name)
		if err != nil {
			if value(from.ConfigMapRef.Optional, false) {
				return nil, nil
			}
			return nil, err
		}
		maps.Copy(values, m.Data)
	}
	return values, nil
}

func (c *container) valueFrom(pod *corev1.Pod, from *corev1.EnvVarSource) (v string, skip bool, err error) {
	switch {
	case from.FieldRef != nil:
		v, err = c.w.field(pod, from.FieldRef.FieldPath)
		return v, false, err
	case from.SecretKeyRef != nil:
		r := from.SecretKeyRef
		s, err := c.w.k.secrets.Secrets(pod.Namespace).Get(r.Name)
		if err == nil {
			if b, ok := s.Data[r.Key]; ok {
				return string(b), false, nil
			}
			err = fmt.Errorf("secret %q has no key %q", r.Name, r.Key)
		}
		if value(r.Optional, false) {
			return "", true, nil
		}
		return "", false, err
	case from.ConfigMapKeyRef != nil:
		r := from.ConfigMapKeyRef
		m, err := c.w.k.configMaps.ConfigMaps(pod.Namespace).Get(r.Name)
		if err == nil {
			if s, ok := m.Data[r.Key]; ok {
				return s, false, nil
			}
			err = fmt.Errorf("config map %q has no key %q", r.Name, r.Key)
		}
		if value(r.Optional, false) {
			return "", true, nil
		}
		return "", false, err
	case from.ResourceFieldRef != nil:
		v, err = c.resource(from.ResourceFieldRef)
		return v, false, err
	}
	return "", false, fmt.Errorf("this source of a value is not known here")
}

// resource is of the container's own limits and requests.
func (c *container) resource(r *corev1.ResourceFieldSelector) (string, error) {
	kind, name, _ := strings.Cut(r.Resource, ".")
	list := c.spec.Resources.Limits
	if kind == "requests" {
		list = c.spec.Resources.Requests
	}
	q, ok := list[corev1.ResourceName(name)]
	if !ok {
		// Without one it is what the node has.
		q = map[string]resource.Quantity{"cpu": resource.MustParse("2"), "memory": resource.MustParse("4Gi")}[name]
	}
	divisor := r.Divisor
	if divisor.IsZero() {
		divisor = resource.MustParse("1")
	}
	n := (q.MilliValue() + divisor.MilliValue() - 1) / divisor.MilliValue()
	return strconv.FormatInt(n, 10), nil
}

func (w *worker) addresses() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.ips
}

// field is a value of the downward API.
func (w *worker) field(pod *corev1.Pod, path string) (string, error) {
	if name, ok := strings.CutPrefix(path, "metadata.labels['"); ok {
		return pod.Labels[strings.TrimSuffix(name, "']")], nil
	}
	if name, ok := strings.CutPrefix(path, "metadata.annotations['"); ok {
		return pod.Annotations[strings.TrimSuffix(name, "']")], nil
	}
	ips, hosts := w.addresses(), w.k.nodeIPs(pod.Spec.NodeName)
	first := func(s []string) string {
		if len(s) == 0 {
			return ""
		}
		return s[0]
	}
	switch path {
	case "metadata.name":
		return pod.Name, nil
	case "metadata.namespace":
		return pod.Namespace, nil
	case "metadata.uid":
		return string(pod.UID), nil
	case "metadata.labels":
		return pairs(pod.Labels), nil
	case "metadata.annotations":
		return pairs(pod.Annotations), nil
	case "spec.nodeName":
		return pod.Spec.NodeName, nil
	case "spec.serviceAccountName":
		return pod.Spec.ServiceAccountName, nil
	case "status.podIP":
		return first(ips), nil
	case "status.podIPs":
		return strings.Join(ips, ","), nil
	case "status.hostIP":
		return first(hosts), nil
	case "status.hostIPs":
		return strings.Join(hosts, ","), nil
	}
	return "", fmt.Errorf("field %q is not known here", path)
}

func pairs(m map[string]string) string {
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(m)) {
		fmt.Fprintf(&b, "%s=%q\n", k, m[k])
	}
	return b.String()
}

func (c *container) expand(s string) string {
	env := map[string]string{}
	for _, e := range c.env {
		k, v, _ := strings.Cut(e, "=")
		env[k] = v
	}
	return expand(s, env)
}

func (c *container) expandAll(list []string) []string {
	out := make([]string, 0, len(list))
	for _, s := range list {
		out = append(out, c.expand(s))
	}
	return out
}

// expand replaces $(NAME) where the name is known; $$ is a dollar.
func expand(s string, env map[string]string) string {
	var b strings.Builder
	for {
		i := strings.IndexByte(s, '$')
		if i < 0 || i+1 == len(s) {
			return b.String() + s
		}
		b.WriteString(s[:i])
		s = s[i:]
		if s[1] == '$' {
			b.WriteByte('$')
			s = s[2:]
			continue
		}
		if end := strings.IndexByte(s, ')'); s[1] == '(' && end > 0 {
			if v, ok := env[s[2:end]]; ok {
				b.WriteString(v)
			} else {
				b.WriteString(s[:end+1])
			}
			s = s[end+1:]
			continue
		}
		b.WriteByte('$')
		s = s[1:]
	}
}
