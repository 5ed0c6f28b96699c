package mcs

import (
	"context"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// From one question to the next whether there is nothing.
const (
	askFirst = time.Second
	askLast  = 10 * time.Second
)

// doubt has all that there was kept until it is certain that it is gone. An API
// server that has lost its store, or finds it again, lists nothing for a moment,
// and ServiceImports are gone from all clusters if that is believed.
// Controller.mu is held.
func (w *watched) doubt(all ...Name) {
	if w.doubts == nil {
		for _, n := range all {
			w.drop(n)
		}
		return
	}
	for _, n := range all {
		w.gone[n] = true
	}
	select {
	case w.doubts <- struct{}{}:
	default:
	}
}

// dropGone drops what is kept. Controller.mu is held.
func (w *watched) dropGone() {
	for n := range w.gone {
		w.drop(n)
	}
	clear(w.gone)
}

// makeSure asks the API server once more whenever there is a doubt, past its cache and until it
// says that there is nothing, or something is seen. It ends with ctx.
func (w *watched) makeSure(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.doubts:
		}
		for pause := askFirst; ; pause = min(2*pause, askLast) {
			why := w.ask(ctx)
			w.c.mu.Lock()
			if why == "" && len(w.gone) > 0 {
				w.dropGone()
				w.c.kick()
			}
			doubted := len(w.gone) > 0
			w.c.mu.Unlock()
			if !doubted {
				why = ""
			}
			if w.c.said.New("doubt "+w.name+" "+w.resource.String()+" "+w.namespace, why) {
				w.c.log.Warn("multi-cluster services: not believed, and asked again: "+why, "cluster", w.name, "namespace", w.namespace)
			}
			if !doubted {
				break
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
		}
	}
}

// ask returns "" if the API server says that there is nothing.
func (w *watched) ask(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	l, err := w.list(ctx, metav1.ListOptions{Limit: 1})
	switch {
	case apierrors.IsNotFound(err): // their CRD went, and they with it
	case err != nil:
		return fmt.Sprintf("all %s are gone, and it can't be found out whether they are: %v", w.resource, err)
	case meta.LenList(l) > 0:
		return fmt.Sprintf("all %s were gone, and the API server has some", w.resource)
	}
	return ""
}
