package client

import (
	"errors"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Denied says in one line why a verb on a resource failed, if only an administrator can change that:
// "may not list tlsroutes.gateway.networking.k8s.io: ..." where RBAC forbids it, or that the API
// server has no such resource where a CRD is missing. It is false for what passes by itself, such as
// a server that cannot be reached. If err was made by Asked its verb and resource are used, and
// otherwise verb and res.
func Denied(verb string, res schema.GroupResource, err error) (string, bool) {
	if a := (*asked)(nil); errors.As(err, &a) {
		verb, res = a.verb, a.res
	}
	switch {
	case apierrors.IsForbidden(err):
		return fmt.Sprintf("may not %s %s: %s", verb, res, reason(err)), true
	case apierrors.IsUnauthorized(err):
		return fmt.Sprintf("may not %s %s: the API server does not recognize the credentials: %s", verb, res, reason(err)), true
	case apierrors.IsNotFound(err) && !named(err):
		return fmt.Sprintf("can't %s %s: the API server has no such resource; is its CRD installed?", verb, res), true
	}
	return "", false
}

// An asked is an error with what was asked of the API server.
type asked struct {
	verb string
	res  schema.GroupResource
	error
}

func (a *asked) Unwrap() error { return a.error }

// Asked returns err with the verb and the resource that it is the answer to, for a task of several
// requests. Nil stays nil.
func Asked(verb string, res schema.GroupResource, err error) error {
	if err == nil {
		return nil
	}
	return &asked{verb, res, err}
}

// Question returns the verb and the resource that Asked added to err, "get serviceaccounts", or "".
func Question(err error) string {
	if a := (*asked)(nil); errors.As(err, &a) {
		return a.verb + " " + a.res.String()
	}
	return ""
}

// named reports whether a 404 is for lack of an object, not of its kind.
func named(err error) bool {
	var s apierrors.APIStatus
	return errors.As(err, &s) && s.Status().Details != nil && s.Status().Details.Name != ""
}

// reason returns the API server's own message, without what wraps it, in one line.
func reason(err error) string {
	text := err.Error()
	var s apierrors.APIStatus
	if errors.As(err, &s) && s.Status().Message != "" && s.Status().Status == metav1.StatusFailure {
		text = s.Status().Message
	}
	return strings.Join(strings.Fields(text), " ")
}
