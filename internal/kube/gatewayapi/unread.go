package gatewayapi

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
)

// An object that may not be read is not reported as missing: whoever then looks for the object would
// not find that a role lacks a verb.

// unread returns a text that objects of a kind, such as "Secrets", may not be read, or "".
func (t *translator) unread(resource, kinds, namespace string) string {
	switch {
	case t.in.Unread == nil || !t.in.Unread(resource, namespace):
		return ""
	case namespace == "":
		return kinds + " may not be read"
	}
	return fmt.Sprintf("%s may not be read in namespace %q", kinds, namespace)
}

// absent returns a text that there is no such object, or that this is not known.
func (t *translator) absent(resource, kinds, namespace, what string) string {
	if why := t.unread(resource, kinds, namespace); why != "" {
		return why + ", and nothing is known of " + what
	}
	return "there is no " + what
}

// ungranted returns a text that there is no grant, or that this is not known.
func (t *translator) ungranted(from referrer, kind, namespace, name string) string {
	if why := t.unread("referencegrants", "ReferenceGrants", namespace); why != "" {
		return fmt.Sprintf("%s, and none lets a %s of %q refer to %s %q", why, from.kind, from.namespace, kind, name)
	}
	return fmt.Sprintf("no ReferenceGrant of namespace %q lets a %s of %q refer to %s %q", namespace, from.kind, from.namespace, kind, name)
}

// absentSecret is absent for a Secret with a certificate.
func (t *translator) absentSecret(namespace, name string) string {
	return t.absent("secrets", "Secrets", namespace, fmt.Sprintf("Secret %q of type %s in namespace %q", name, corev1.SecretTypeTLS, namespace))
}
