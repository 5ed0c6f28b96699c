package gatewayapi

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// What may not be read is not what is not there: who looks for a Secret in vain is
// not helped by a role that lacks a verb.

// unread says so of kinds, "Secrets", or is "".
func (t *translator) unread(resource, kinds, namespace string) string {
	switch {
	case t.in.Unread == nil || !t.in.Unread(resource, namespace):
		return ""
	case namespace == "":
		return kinds + " may not be read"
	}
	return fmt.Sprintf("%s may not be read in namespace %q", kinds, namespace)
}

// absent says that there is no such object, or that it can't be known.
func (t *translator) absent(resource, kinds, namespace, what string) string {
	if why := t.unread(resource, kinds, namespace); why != "" {
		return why + ", and nothing is known of " + what
	}
	return "there is no " + what
}

// ungranted says that there is no grant, or that it can't be known.
func (t *translator) ungranted(from referrer, kind, namespace, name string) string {
	if why := t.unread("referencegrants", "ReferenceGrants", namespace); why != "" {
		return fmt.Sprintf("%s, and none lets a %s of %q refer to %s %q", why, from.kind, from.namespace, kind, name)
	}
	return fmt.Sprintf("no ReferenceGrant of namespace %q lets a %s of %q refer to %s %q", namespace, from.kind, from.namespace, kind, name)
}

// absentSecret is absent of a Secret with a certificate.
func (t *translator) absentSecret(namespace, name string) string {
	return t.absent("secrets", "Secrets", namespace, fmt.Sprintf("Secret %q of type %s in namespace %q", name, corev1.SecretTypeTLS, namespace))
}
