-- The databases and users of Prefect and MLflow, made once by a superuser of PostgreSQL 14 or newer:
--   PREFECT_DATABASE_PASSWORD=… MLFLOW_DATABASE_PASSWORD=… psql --no-psqlrc --file deploy/postgres/databases.sql
-- The passwords come from the environment, so that they are on no command line; without them nothing is made.
\set ON_ERROR_STOP on
\getenv prefect_password PREFECT_DATABASE_PASSWORD
\getenv mlflow_password MLFLOW_DATABASE_PASSWORD

-- PostgreSQL's own log gets none of the following statements.
SET log_statement = 'none';
SET log_min_duration_statement = -1;
SET log_min_error_statement = 'panic';

CREATE ROLE prefect LOGIN PASSWORD :'prefect_password';
CREATE ROLE mlflow LOGIN PASSWORD :'mlflow_password';

CREATE DATABASE prefect OWNER prefect;
CREATE DATABASE mlflow OWNER mlflow;
-- MLflow's users and their permissions.
CREATE DATABASE mlflow_users OWNER mlflow;

REVOKE ALL ON DATABASE prefect, mlflow, mlflow_users FROM PUBLIC;
